"""The ``varlen`` backend: torch's kernel on CUDA, a stand-in that keeps its contract elsewhere."""

import math
from itertools import pairwise

import pytest
import torch

from tests.support.attention_cases import DTYPES, random_case
from worker.attention.trial import TOLERANCE, error_of, exact
from worker.attention.varlen import VarlenAttention, varlen_problem


def plain_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """What torch 2.13 documents of ``varlen_attn``, for pages, one row after the other."""
    assert block_table is not None and block_table.dtype == torch.int32
    assert seqused_k is not None and seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert cu_seq_k is None and window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert key.shape == value.shape and key.stride(-1) == 1
    starts, used = cu_seq_q.tolist(), seqused_k.tolist()
    assert max_q >= max(b - a for a, b in pairwise(starts))
    assert max_k >= max(used)
    outs = []
    for row, keys in enumerate(used):
        queries = query[starts[row] : starts[row + 1]].float()
        shared = queries.shape[1] // key.shape[2]
        k, v = (
            pages[block_table[row].long()]
            .flatten(0, 1)[:keys]
            .float()
            .repeat_interleave(shared, dim=1)
            for pages in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, k) / math.sqrt(queries.shape[-1])
        # Aligned to the last key; ``window_size[0]`` keys to the left, its own not counted.
        age = torch.arange(keys - len(queries), keys)[:, None] - torch.arange(keys)
        hidden = age < 0
        if window_size[0] >= 0:
            hidden |= age > window_size[0]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes_by_the_documented_contract(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    for seed in range(12):
        case = random_case(seed, dtype, torch.device("cpu"))
        backend = VarlenAttention(case.pool, case.heads, windows=case.windows)
        for layer, window in enumerate(case.windows):
            expected = exact(case.pool, layer, case.trial, window)
            assert error_of(backend, layer, case.trial, expected) < TOLERANCE[dtype], str(case)


def test_a_torch_without_block_tables_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has the function, without what pages need."""

    def old(query: object, key: object, value: object, *, window_size: object = ()) -> None: ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
    problem = varlen_problem()
    assert problem is not None and "has no block_table, enable_gqa" in problem
    case = random_case(0, torch.float32, torch.device("cpu"))
    with pytest.raises(ImportError, match="block_table"):
        VarlenAttention(case.pool, case.heads)


def test_the_signature_of_the_torch_that_is_pinned() -> None:
    assert varlen_problem() is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_random_shapes_on_cuda(dtype: torch.dtype, seed: int) -> None:
    if (problem := varlen_problem()) is not None:
        pytest.skip(problem)
    case = random_case(seed, dtype, torch.device("cuda"))
    backend = VarlenAttention(case.pool, case.heads, windows=case.windows)
    for layer, window in enumerate(case.windows):
        expected = exact(case.pool, layer, case.trial, window)
        try:
            error = error_of(backend, layer, case.trial, expected)
        except RuntimeError as refused:
            pytest.skip(f"the kernel refuses {case}: {refused}")
        assert error < TOLERANCE[dtype], str(case)
