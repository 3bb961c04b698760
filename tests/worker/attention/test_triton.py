"""The ``triton`` backend against float64: compiled on CUDA, else under triton's interpreter.

triton reads TRITON_INTERPRET when it is imported, so without CUDA these run in a process of their
own (``test_interpreted.py``).
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.attention_cases import DTYPES, random_case
from worker.attention import KVPool
from worker.attention.choice import TOLERANCE, error_of, exact, make_trial

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# float16 differs from bfloat16 in no tile and no order; the interpreter takes seconds for it.
TYPES = DTYPES[:2] if INTERPRETED else DTYPES

pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a CUDA device, or triton's interpreter: see test_interpreted.py",
    )
]
if INTERPRETED or torch.cuda.is_available():
    pytest.importorskip("triton")
    from worker.attention.triton_backend import TritonAttention


@pytest.fixture(autouse=True, scope="module")
def sound_interpreter() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from tests.support.interpreter import repaired

    with repaired():
        yield


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 4))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_random_shapes(dtype: torch.dtype, seed: int, invariant: bool) -> None:
    case = random_case(seed, dtype, DEVICE)
    backend = TritonAttention(case.pool, case.heads, windows=case.windows, invariant=invariant)
    for layer, window in enumerate(case.windows):
        expected = exact(case.pool, layer, case.trial, window)
        assert error_of(backend, layer, case.trial, expected) < TOLERANCE[dtype], str(case)


@pytest.mark.parametrize("seed", range(2))
def test_keys_split_over_programs(seed: int) -> None:
    """Long contexts in a small batch: several shares, some of them empty."""
    case = random_case(seed, torch.float32, DEVICE, longest=300)
    backend = TritonAttention(case.pool, case.heads, windows=case.windows)
    for layer, window in enumerate(case.windows):
        expected = exact(case.pool, layer, case.trial, window)
        assert error_of(backend, layer, case.trial, expected) < TOLERANCE[torch.float32], str(case)


SHARED = {1: 64, 2: 16, 5: 32, 8: 48, 16: 16}
"""Tokens of a block by query heads per KV head."""


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_decodes_and_chunks_of_uneven_lengths(dim: int, shared: int) -> None:
    """In one step, with heads and blocks of every size that models have."""
    contexts, chunks, page = [1, 75, 20], [(5, 5), (3, 70)], SHARED[shared]
    for dtype in TYPES:
        pool = KVPool(
            layers=1,
            blocks=sum(-(-keys // page) for keys in (1, 75, 20, 5, 70)),
            block_tokens=page,
            kv_heads=1,
            head_dim=dim,
            dtype=dtype,
            device=DEVICE,
        )
        pool.data.normal_(generator=torch.Generator(DEVICE).manual_seed(shared))
        trial = make_trial(pool, shared, contexts, chunks, np.random.default_rng(dim))
        expected = exact(pool, 0, trial, 0)
        assert error_of(TritonAttention(pool, shared), 0, trial, expected) < TOLERANCE[dtype]


HEAD_SHAPES = [(80, 16, 64), (96, 3, 32), (256, 5, 16), (64, 1, 16), (128, 8, 16)]
"""Dimensions of a head, query heads per KV head, and tokens of a block. The last two fill their
tiles, and are left to a GPU: the interpreter takes more than a second for each."""


@pytest.mark.parametrize(("dim", "shared", "page"), HEAD_SHAPES[: 3 if INTERPRETED else None])
def test_one_long_text_among_short_ones(dim: int, shared: int, page: int) -> None:
    """Its keys are split over programs, beside decodes and chunks that are done by one each."""
    contexts, chunks = [5, 300, 1, 33, *[2] * 6], [(2, 420), (20, 20), (1, 90)]
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    pool = KVPool(
        layers=1,
        blocks=sum(-(-keys // page) for keys in (*contexts, 420, 20, 90)),
        block_tokens=page,
        kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=DEVICE,
    )
    pool.data.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    trial = make_trial(pool, 2 * shared, contexts, chunks, np.random.default_rng(dim))
    backend = TritonAttention(pool, 2 * shared)
    step = backend.prepare(trial.batch)
    counts = [a_pass.items.part_counts.tolist() for a_pass in step.passes]
    assert counts[0][1] > 2 and counts[0][0] == counts[0][2] == 1
    assert min(counts[1]) == 1 and (max(counts[1]) > 1 or not INTERPRETED)
    assert error_of(backend, 0, trial, exact(pool, 0, trial, 0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("contexts", [[1], [5, 3000, 1, 40], [64] * 33, [900, 900, 900]])
def test_the_device_shares_keys_out_as_the_host_does(contexts: list[int]) -> None:
    pool = KVPool(
        layers=1,
        blocks=1,
        block_tokens=16,
        kv_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    backend = TritonAttention(pool, 4)
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
    """WK-3: a text's last query, computed as a decode, in any chunk, alone or beside others."""
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
