"""The ``triton`` backend against float64: compiled on CUDA, else under triton's interpreter.

triton reads TRITON_INTERPRET when it is imported, so without CUDA these run in a process of their
own (``test_interpreted.py``).
"""

import numpy as np
import pytest
import torch

from tests.support.attention_cases import DTYPES, assert_exact, pool_of, random_case
from tests.support.triton_tests import DEVICE, INTERPRETED, NEEDS_TRITON, sound_interpreter
from worker.attention.choice import TOLERANCE, exact

# float16 differs from bfloat16 in no tile and no order; the interpreter takes seconds for it.
TYPES = DTYPES[:2] if INTERPRETED else DTYPES

__all__ = ["sound_interpreter"]
pytestmark = NEEDS_TRITON
if INTERPRETED or torch.cuda.is_available():
    pytest.importorskip("triton")
    from worker.attention.triton_backend import TritonAttention


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 4))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_random_shapes(dtype: torch.dtype, seed: int, invariant: bool) -> None:
    case = random_case(seed, dtype, DEVICE)
    backend = TritonAttention(case.pool, case.heads, windows=case.windows, invariant=invariant)
    assert_exact(backend, case.pool, case.trial, case.windows)


@pytest.mark.parametrize("seed", range(2))
def test_keys_split_over_programs(seed: int) -> None:
    """Long contexts in a small batch: several shares, some of them empty."""
    case = random_case(seed, torch.float32, DEVICE, longest=300)
    backend = TritonAttention(case.pool, case.heads, windows=case.windows)
    assert_exact(backend, case.pool, case.trial, case.windows)


@pytest.mark.parametrize("contexts", [[1], [5, 3000, 1, 40], [64] * 33, [900, 900, 900]])
def test_the_device_shares_keys_out_as_the_host_does(contexts: list[int]) -> None:
    backend = TritonAttention(pool_of(1, 2, 16, dtype=torch.bfloat16, device=DEVICE), 4)
    table = torch.zeros((len(contexts), 200), dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(len(contexts), dtype=torch.int64, device=DEVICE)
    keys = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    step = backend.decode_step(slots, table, keys, most_keys=3200)
    backend.plan(step)
    items, firsts, counts = backend._items_of(np.array(contexts), backend._decodes)
    there = step.passes[0].items
    assert there.first_parts.tolist() == firsts.tolist()
    assert there.part_counts.tolist() == counts.tolist()
    found = there.items.view(-1, 4).tolist()
    assert sorted(item for item in found if item[0] >= 0) == sorted(items.reshape(-1, 4).tolist())
    for row, context in enumerate(contexts):
        tiles = [tile for item in found if item[0] == row for tile in range(*item[1:3])]
        assert tiles == list(range(-(-context // backend._decodes.keys)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_invariant_results_depend_on_nothing_but_the_row(dtype: torch.dtype) -> None:
    """WK-3: a text's last query, computed as a decode, in any chunk, alone or next to others."""
    from tests.support.shared_batches import company_of

    outs = company_of(
        lambda pool, heads: TritonAttention(pool, heads, windows=(0, 20), invariant=True),
        dtype,
        DEVICE,
    )
    assert len(outs) > 6
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_decode_from_fixed_tensors(dtype: torch.dtype) -> None:
    """What a CUDA graph replays: refilled tensors, and rows of padding on one dummy page."""
    case = next(
        case
        for case in (random_case(seed, dtype, DEVICE) for seed in range(100))
        if case.trial.batch.decodes == 3 and len(case.trial.batch.query_tokens) == 3
    )
    batch, pool = case.trial.batch, case.pool
    dummy = int(batch.block_table[0, -1] * 0 + pool.data.shape[1] - 1)
    if dummy in batch.block_table:
        pytest.skip("the dummy page is taken")
    padded, width = 5, batch.block_table.shape[1]
    table = torch.full((padded, width), dummy, dtype=torch.int32, device=DEVICE)
    contexts = torch.ones(padded, dtype=torch.int32, device=DEVICE)
    slots = torch.full((padded,), dummy * pool.block_tokens, device=DEVICE)
    step = TritonAttention(pool, case.heads, windows=case.windows).decode_step(
        slots, table, contexts, most_keys=300
    )
    table[:3] = torch.from_numpy(batch.block_table)
    contexts[:3] = torch.from_numpy(batch.context_tokens)
    slots[:3] = torch.from_numpy(batch.slots)
    queries = case.trial.queries.new_zeros((padded, *case.trial.queries.shape[1:]))
    keys_values = case.trial.keys_values.new_zeros((padded, *case.trial.keys_values.shape[1:]))
    queries[:3], keys_values[:3] = case.trial.queries, case.trial.keys_values
    for layer, window in enumerate(case.windows):
        expected = exact(pool, layer, case.trial, window)
        before = pool.data.clone()
        out = step.attend(layer, queries, keys_values)
        error = (out[:3].double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], str(case)
        assert out.isfinite().all()
        before[layer, dummy] = pool.data[layer, dummy]
        assert torch.equal(pool.data, before), "padding touched a page that is not the dummy"
