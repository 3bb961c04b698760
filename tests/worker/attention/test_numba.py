"""Attention compiled for the CPU, against float64."""

import numpy as np
import pytest
import torch

from tests.worker.attention.cases import random_case
from worker.attention.numba_backend import NumbaAttention
from worker.attention.trial import TOLERANCE, error_of, exact

CPU = torch.device("cpu")


# A compilation each: shapes with decodes and chunks, shared heads, pages of one token and of many.
@pytest.mark.parametrize("seed", [0, 6])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_random_shapes(dtype: torch.dtype, seed: int) -> None:
    case = random_case(seed, dtype, CPU)
    backend = NumbaAttention(case.pool, case.heads, windows=case.windows)
    for layer, window in enumerate(case.windows):
        expected = exact(case.pool, layer, case.trial, window)
        assert error_of(backend, layer, case.trial, expected) < TOLERANCE[dtype], str(case)


def test_it_says_what_it_is_not_for() -> None:
    case = random_case(1, torch.float16, CPU)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        NumbaAttention(case.pool, case.heads)


def test_what_lies_behind_a_text_does_not_count() -> None:
    """A block that others have left may hold anything, and a broken model leaves NaNs."""
    case = random_case(0, torch.float32, CPU)
    batch = case.trial.batch
    assert batch.decodes
    backend = NumbaAttention(case.pool, case.heads)
    step = backend.prepare(batch)
    before = step.attend(0, case.trial.queries, case.trial.keys_values)[: batch.decodes].clone()
    page = case.pool.block_tokens
    for row in range(batch.decodes):
        keys = int(batch.context_tokens[row])
        last = int(batch.block_table[row, (keys - 1) // page])
        case.pool.data[0, last, (keys - 1) % page + 1 :] = torch.nan
    after = step.attend(0, case.trial.queries, case.trial.keys_values)[: batch.decodes]
    np.testing.assert_array_equal(before.numpy(), after.numpy())
