"""The ``flashinfer`` backend: on CUDA, and by a stand-in that keeps FlashInfer's contract."""

import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.attention_cases import DTYPES, Case, assert_exact, pool_of, random_case
from worker.attention import KVPool, flashinfer_backend
from worker.attention.choice import TOLERANCE, error_of, exact, make_trial
from worker.attention.flashinfer_backend import FlashInferAttention, flashinfer_problem
from worker.attention.reference import ReferenceAttention


class PlainWrapper:
    """What FlashInfer 0.7.2 documents of its wrapper for chunks, one row after the other."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        non_blocking: bool = True,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        lasts = paged_kv_last_page_len
        arrays = [qo_indptr, paged_kv_indptr, paged_kv_indices, lasts]
        assert all(one.dtype == torch.int32 and one.device.type == "cpu" for one in arrays)
        rows = len(lasts)
        assert len(qo_indptr) == len(paged_kv_indptr) == rows + 1
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert (qo_indptr.diff() > 0).all() and (paged_kv_indptr.diff() > 0).all()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((lasts >= 1) & (lasts <= page_size)).all()
        assert causal and window_left >= -1
        self.keys = (paged_kv_indptr.diff() - 1) * page_size + lasts
        assert seq_lens is not None and (seq_lens == self.keys).all()
        self.starts, self.firsts, self.pages = (one.tolist() for one in arrays[:3])
        self.heads, self.kv_heads, self.page = num_qo_heads, num_kv_heads, page_size
        self.dim, self.dtype, self.window_left = head_dim_qk, q_data_type, window_left

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == (self.page, self.kv_heads, self.dim)
        # The pool as it is: FlashAttention 3 wants equal strides, and whole heads.
        assert keys.stride() == values.stride() and keys.stride(-1) == q.stride(-1) == 1
        assert q.shape == out.shape == (self.starts[-1], self.heads, self.dim)
        assert q.dtype == keys.dtype == out.dtype == self.dtype
        shared = self.heads // self.kv_heads
        for row, count in enumerate(self.keys.tolist()):
            tokens = slice(self.starts[row], self.starts[row + 1])
            pages = self.pages[self.firsts[row] : self.firsts[row + 1]]
            k, v = (
                cache[pages].flatten(0, 1)[:count].float().repeat_interleave(shared, dim=1)
                for cache in paged_kv_cache
            )
            queries = q[tokens].float()
            scores = torch.einsum("qhd,khd->hqk", queries, k) / math.sqrt(self.dim)
            # Aligned to the last key; ``window_left`` keys to the left, its own not counted.
            age = torch.arange(count - len(queries), count)[:, None] - torch.arange(count)
            hidden = age < 0
            if self.window_left >= 0:
                hidden |= age > self.window_left
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """FlashInfer by ``PlainWrapper``, for any dtype and head size; decodes by the reference."""
    module = types.ModuleType("flashinfer")
    module.__version__ = "0.0"  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = PlainWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_backend, "TritonAttention", ReferenceAttention)
    monkeypatch.setattr(flashinfer_backend, "DTYPES", DTYPES)
    monkeypatch.setattr(flashinfer_backend, "HEAD_DIMS", (16, 24, 64, 80, 128))
    return module


def cpu_case(seed: int, dtype: torch.dtype = torch.float32) -> Case:
    return random_case(seed, dtype, torch.device("cpu"))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes_by_the_documented_contract(dtype: torch.dtype) -> None:
    for seed in range(12):
        case = cpu_case(seed, dtype)
        backend = FlashInferAttention(case.pool, case.heads, windows=case.windows)
        assert_exact(backend, case.pool, case.trial, case.windows)


@pytest.mark.usefixtures("stand_in")
def test_a_chunk_reads_what_a_decode_of_the_same_step_writes() -> None:
    """As any backend does: all is stored before anything attends."""
    pool = pool_of(4, 1, 16, page=4)
    trial = make_trial(pool, 2, [4], [(3, 7)], np.random.default_rng(0))
    # The chunk's first block is the decode's, whose last slot is only now filled.
    trial.batch.block_table[1, 0] = trial.batch.block_table[0, 0]
    first_chunk_slot = trial.batch.block_table[1, 1] * 4
    trial = replace(
        trial,
        batch=replace(
            trial.batch,
            slots=np.array([trial.batch.slots[0], *range(first_chunk_slot, first_chunk_slot + 3)]),
        ),
    )
    expected = exact(pool, 0, trial)
    pool.data.zero_()
    backend = FlashInferAttention(pool, 2)
    assert error_of(backend, 0, trial, expected) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("stand_in")
def test_a_step_is_valid_while_the_next_one_is_prepared() -> None:
    case = cpu_case(4)
    backend = FlashInferAttention(case.pool, case.heads)
    rng = np.random.default_rng(5)
    trials = [make_trial(case.pool, case.heads, [], [(n, 2 * n)], rng) for n in (3, 20)]
    steps = [backend.prepare(trial.batch) for trial in trials]
    for trial, step in zip(trials, steps, strict=True):
        expected = exact(case.pool, 0, trial)
        out = step.attend(0, trial.queries, trial.keys_values)
        assert (out - expected).norm() < TOLERANCE[torch.float32] * expected.norm()


def test_without_flashinfer_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pool = small_pool(torch.bfloat16, 64)
    with pytest.raises(ImportError, match=r"not installed: .* pip install .*flashinfer-python=="):
        FlashInferAttention(pool, 2)


def test_a_flashinfer_with_other_parameters_is_named(stand_in: types.ModuleType) -> None:
    class Older(PlainWrapper):
        def plan(self, qo_indptr: torch.Tensor, *, causal: bool = False) -> None: ...  # type: ignore[override]

    assert flashinfer_problem() is None
    stand_in.BatchPrefillWithPagedKVCacheWrapper = Older  # type: ignore[attr-defined]
    assert flashinfer_problem() == (
        "plan of FlashInfer 0.0 has no non_blocking, q_data_type, seq_lens, window_left"
    )
    del stand_in.BatchPrefillWithPagedKVCacheWrapper
    assert "has no BatchPrefillWithPagedKVCacheWrapper" in (flashinfer_problem() or "")


def small_pool(dtype: torch.dtype, dim: int) -> KVPool:
    return pool_of(4, 1, dim, dtype=dtype)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 128), (torch.bfloat16, 80)])
def test_what_it_has_no_kernels_for_is_refused_before_anything_compiles(
    dtype: torch.dtype, dim: int
) -> None:
    with pytest.raises(ValueError, match=f"no kernels for heads of {dim} in {dtype}"):
        FlashInferAttention(small_pool(dtype, dim), 2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(4))
def test_chunks_on_cuda(seed: int) -> None:
    """One dtype and head size: each other one compiles for minutes."""
    if (problem := flashinfer_problem()) is not None:
        pytest.skip(problem)
    rng = np.random.default_rng(seed)
    kv_heads, shared = ((8, 4), (1, 7), (2, 1), (4, 8))[seed]
    device = torch.device("cuda")
    pool = pool_of(600, kv_heads, 128, dtype=torch.bfloat16, device=device, rng=rng)
    contexts = rng.integers(1, 900, 4).tolist()
    chunks = [(int(rng.integers(1, keys + 1)), int(keys)) for keys in rng.integers(20, 900, 3)]
    trial = make_trial(pool, kv_heads * shared, contexts, chunks, rng)
    assert_exact(FlashInferAttention(pool, kv_heads * shared), pool, trial, [0])
