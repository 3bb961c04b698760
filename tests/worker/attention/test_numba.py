"""Attention compiled for the CPU, against float64 and against itself."""

import numpy as np
import pytest
import torch

from tests.support.attention_cases import CPU, assert_exact, pool_of, random_case
from worker.attention import KVPool, numba_backend
from worker.attention.choice import TOLERANCE, Trial, error_of, exact, make_trial
from worker.attention.numba_backend import NumbaAttention
from worker.cpu_kernels import team
from worker.cpu_kernels.attention_loops import SPAN_TOKENS
from worker.cpu_kernels.block_products import products_problem
from worker.cpu_kernels.prompt_loops import PART_TOKENS, TILE_KEYS

WINDOWS = (0, 300, 20, TILE_KEYS + 1)
# New tokens and all keys: some end with a tile, or begin and end within a part and a block; with
# the shortest window the last queries of a part see nothing of the tile that its first ones see.
CHUNKS = [
    (7, 40),
    (3, 3),
    (TILE_KEYS, TILE_KEYS),
    (2, TILE_KEYS + 1),
    (PART_TOKENS + 15, 270),
    (60, 200),
]
CONTEXTS = [1, 16, 17, SPAN_TOKENS, SPAN_TOKENS + 1, 3 * SPAN_TOKENS + 30, 5]
# Type, tokens of a page, heads, KV heads, size of a head.
SHAPES = [(torch.bfloat16, 16, 10, 2, 40), (torch.float32, 3, 6, 2, 16)]
Shape = tuple[torch.dtype, int, int, int, int]
packs_chunks = pytest.mark.skipif(products_problem() is not None, reason=str(products_problem()))


def filled(shape: Shape, rng: np.random.Generator) -> KVPool:
    dtype, page, _, kv_heads, dim = shape
    layers = len(WINDOWS)
    return pool_of(3000 // page, kv_heads, dim, layers=layers, page=page, dtype=dtype, rng=rng)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_length_and_window(shape: Shape, threads: int) -> None:
    rng = np.random.default_rng(7)
    pool = filled(shape, rng)
    backend = NumbaAttention(pool, shape[2], windows=WINDOWS)
    for chunks in ([], CHUNKS[:1], CHUNKS):
        trial = make_trial(pool, shape[2], CONTEXTS, chunks, rng)
        for layer, window in enumerate(WINDOWS):
            expected = exact(pool, layer, trial, window)
            step = backend.prepare(trial.batch)
            found = step.attend(layer, trial.queries, trial.keys_values).double()
            errors = (found - expected).norm(dim=2) / expected.norm(dim=2)
            assert errors.max() < TOLERANCE[shape[0]], (chunks, window)


def test_a_row_does_not_depend_on_its_company(threads: int) -> None:
    rng = np.random.default_rng(3)
    shape = SHAPES[1]
    pool = filled(shape, rng)
    backend = NumbaAttention(pool, shape[2])
    trial = make_trial(pool, shape[2], CONTEXTS, [], rng)
    together = backend.prepare(trial.batch).attend(0, trial.queries, trial.keys_values)
    for row in range(len(CONTEXTS)):
        one = slice(row, row + 1)
        alone = backend.prepare(
            type(trial.batch)(
                decodes=1,
                query_tokens=trial.batch.query_tokens[one],
                context_tokens=trial.batch.context_tokens[one],
                block_table=trial.batch.block_table[one],
                slots=trial.batch.slots[one],
            )
        ).attend(0, trial.queries[one], trial.keys_values[one])
        np.testing.assert_array_equal(alone.numpy(), together[one].numpy())


@packs_chunks
def test_what_lies_behind_a_text_does_not_count() -> None:
    rng = np.random.default_rng(4)
    shape = SHAPES[1]
    pool = filled(shape, rng)
    trial: Trial = make_trial(pool, shape[2], CONTEXTS, CHUNKS, rng)
    expected = exact(pool, 0, trial)
    page = shape[1]
    for row, keys in enumerate(trial.batch.context_tokens):
        last = int(trial.batch.block_table[row, (keys - 1) // page])
        pool.data[0, last, (keys - 1) % page + 1 :] = torch.nan
    backend = NumbaAttention(pool, shape[2])
    assert error_of(backend, 0, trial, expected) < TOLERANCE[torch.float32]


@packs_chunks
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_prompt_with_a_key_that_is_no_number_has_no_result(shape: Shape, bad: float) -> None:
    """Not even where the values are numbers: the engine has to see that the model is broken."""
    rng = np.random.default_rng(4)
    pool = filled(shape, rng)
    trial = make_trial(pool, shape[2], [], [(30, 40)], rng)
    trial.keys_values[12, : shape[3]] = bad
    backend = NumbaAttention(pool, shape[2])
    found = backend.prepare(trial.batch).attend(0, trial.queries, trial.keys_values)
    assert found[:12].isfinite().all() and found[12:].isnan().any(2).all()


@pytest.mark.parametrize("way", [pytest.param("few at a time", marks=packs_chunks), "by torch"])
def test_chunks_that_are_not_packed_together(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "by torch":  # as on a CPU without AVX2
        monkeypatch.setattr(numba_backend, "products_problem", lambda: "the CPU has none")
    rng = np.random.default_rng(4)
    shape = SHAPES[1]
    pool = filled(shape, rng)
    backend = NumbaAttention(pool, shape[2], windows=WINDOWS)
    monkeypatch.setattr(numba_backend, "_MOST_PACKED_BYTES", 2 * backend.tile_bytes)
    trial = make_trial(pool, shape[2], CONTEXTS, CHUNKS, rng)
    groups = [range(7, 9), range(9, 10), range(10, 11), range(11, 12), range(12, 13)]
    assert backend.chunk_groups(trial.batch) == ([] if way == "by torch" else groups)
    assert_exact(backend, pool, trial, WINDOWS)


def test_without_torchs_openmp_one_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_parallel", lambda: None)
    rng = np.random.default_rng(4)
    shape = SHAPES[1]
    pool = filled(shape, rng)
    trial = make_trial(pool, shape[2], CONTEXTS, [], rng)
    assert_exact(NumbaAttention(pool, shape[2]), pool, trial, [0])


def test_it_says_what_it_is_not_for() -> None:
    case = random_case(1, torch.float16, CPU)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        NumbaAttention(case.pool, case.heads)
