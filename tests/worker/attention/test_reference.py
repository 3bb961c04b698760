"""The oracle of the engine's tests, against float64."""

import pytest
import torch

from tests.support.attention_cases import CPU, DTYPES, assert_exact, random_case
from tests.support.cases import for_each
from worker.attention.reference import ReferenceAttention


def holds_for_random_shapes(dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(12):
        case = random_case(seed, dtype, device)
        backend = ReferenceAttention(case.pool, case.heads, windows=case.windows)
        assert_exact(backend, case.pool, case.trial, case.windows)


@for_each("dtype", DTYPES)
def test_random_shapes(dtype: torch.dtype) -> None:
    holds_for_random_shapes(dtype, CPU)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes_on_cuda(dtype: torch.dtype) -> None:
    holds_for_random_shapes(dtype, torch.device("cuda"))
