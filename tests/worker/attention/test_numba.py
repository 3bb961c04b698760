"""Attention compiled for the CPU, against float64.

A compilation takes seconds, so these shapes go through the same lines as plain Python: with
``NUMBA_DISABLE_JIT=1``, in a process of their own (``test_interpreted.py``). Compiled ones are in
``tests/worker/cpu_kernels/test_tiles.py``.
"""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.attention_cases import random_case
from worker.attention import KVPool
from worker.attention.choice import TOLERANCE, Trial, error_of, exact, make_trial
from worker.attention.numba_backend import NumbaAttention

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
# Tokens of a page, heads, KV heads, window, contexts of decodes, chunks.
SHAPES = [
    (1, 2, 2, 0, [3, 9], []),
    (3, 4, 2, 0, [1, 3, 7], [(2, 5)]),
    (4, 6, 2, 5, [4, 13, 30], [(1, 9), (7, 7)]),
    (4, 2, 1, 4, [16, 21], []),
    (16, 4, 4, 1, [40], [(3, 20)]),
    (32, 8, 1, 33, [90, 20], []),
    (8, 4, 2, 0, [], [(5, 5), (2, 11)]),
]
Shape = tuple[int, int, int, int, Sequence[int], Sequence[tuple[int, int]]]


def case_of(shape: Shape, dtype: torch.dtype, dim: int = 8) -> tuple[KVPool, Trial]:
    page, heads, kv_heads, _, contexts, chunks = shape
    rng = np.random.default_rng(5)
    pool = KVPool(
        layers=1,
        blocks=90,
        block_tokens=page,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=CPU,
    )
    pool.data.copy_(torch.from_numpy(rng.standard_normal(pool.data.shape, np.float32)))
    return pool, make_trial(pool, heads, contexts, chunks, rng)


def check(shape: Shape, dtype: torch.dtype) -> None:
    pool, trial = case_of(shape, dtype)
    _, heads, _, window, *_ = shape
    backend = NumbaAttention(pool, heads, windows=[window])
    error = error_of(backend, 0, trial, exact(pool, 0, trial, window))
    assert error < TOLERANCE[dtype], (shape, dtype, error)


@pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") != "1", reason="runs in test_interpreted.py"
)
def test_all_shapes_as_plain_python() -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            check(shape, dtype)


def test_it_says_what_it_is_not_for() -> None:
    case = random_case(1, torch.float16, CPU)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        NumbaAttention(case.pool, case.heads)


def test_what_lies_behind_a_text_does_not_count() -> None:
    """A block that others have left may hold anything, and a broken model leaves NaNs."""
    page, heads, kv_heads, window = 16, 2, 2, 5  # a shape that test_tiles.py compiles
    shape = (page, heads, kv_heads, window, [4, 13, 30], [(1, 9), (7, 7)])
    pool, trial = case_of(shape, torch.float32, dim=32)
    batch = trial.batch
    assert batch.decodes
    backend = NumbaAttention(pool, heads, windows=[window])
    step = backend.prepare(batch)
    before = step.attend(0, trial.queries, trial.keys_values)[: batch.decodes].clone()
    for row in range(batch.decodes):
        keys = int(batch.context_tokens[row])
        last = int(batch.block_table[row, (keys - 1) // page])
        pool.data[0, last, (keys - 1) % page + 1 :] = torch.nan
    after = step.attend(0, trial.queries, trial.keys_values)[: batch.decodes]
    np.testing.assert_array_equal(before.numpy(), after.numpy())
