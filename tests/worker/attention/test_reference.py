"""The oracle of the engine's tests, against float64."""

import pytest
import torch

from tests.worker.attention.cases import DTYPES, random_case
from worker.attention.reference import ReferenceAttention
from worker.attention.trial import TOLERANCE, error_of, exact

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes(dtype: torch.dtype, seed: int) -> None:
    case = random_case(seed, dtype, CPU)
    backend = ReferenceAttention(case.pool, case.heads, windows=case.windows)
    for layer, window in enumerate(case.windows):
        expected = exact(case.pool, layer, case.trial, window)
        assert error_of(backend, layer, case.trial, expected) < TOLERANCE[dtype], str(case)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes_on_cuda(dtype: torch.dtype, seed: int) -> None:
    case = random_case(seed, dtype, torch.device("cuda"))
    backend = ReferenceAttention(case.pool, case.heads, windows=case.windows)
    for layer, window in enumerate(case.windows):
        expected = exact(case.pool, layer, case.trial, window)
        assert error_of(backend, layer, case.trial, expected) < TOLERANCE[dtype], str(case)
