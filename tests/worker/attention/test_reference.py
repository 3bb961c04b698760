"""The oracle of the engine's tests, against float64."""

import numpy as np
import pytest
import torch

from tests.support.attention_cases import DTYPES, random_case
from worker.attention import KVPool, PackedBatch
from worker.attention.choice import TOLERANCE, error_of, exact
from worker.attention.reference import ReferenceAttention

CPU = torch.device("cpu")


def holds_for_random_shapes(dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(12):
        case = random_case(seed, dtype, device)
        backend = ReferenceAttention(case.pool, case.heads, windows=case.windows)
        for layer, window in enumerate(case.windows):
            expected = exact(case.pool, layer, case.trial, window)
            assert error_of(backend, layer, case.trial, expected) < TOLERANCE[dtype], str(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes(dtype: torch.dtype) -> None:
    holds_for_random_shapes(dtype, CPU)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes_on_cuda(dtype: torch.dtype) -> None:
    holds_for_random_shapes(dtype, torch.device("cuda"))


def _decodes(contexts: list[int]) -> PackedBatch:
    """Rows of one token each, on blocks of their own."""
    rows, draw = len(contexts), np.random.default_rng(3)
    table = draw.permutation(rows * 16).reshape(rows, 16)
    return PackedBatch(
        decodes=rows,
        query_tokens=np.ones(rows, np.int64),
        context_tokens=np.array(contexts),
        block_table=table,
        slots=table[:, 0] * 16,
    )


@pytest.mark.parametrize(
    ("contexts", "batches"),
    [
        ([100] * 32, 1),
        ([250] * 8 + [20] * 24, 2),
        ([20] * 24 + [250] * 8, 2),
        (list(range(250, 58, -3)), 4),
        ([30], 1),
    ],
)
def test_rows_of_different_lengths_are_not_padded_to_the_longest(
    contexts: list[int], batches: int
) -> None:
    """Each row's result is what it gets alone, whatever it is batched with."""
    pool = KVPool(
        layers=1,
        blocks=len(contexts) * 16,
        block_tokens=16,
        kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.data.normal_(generator=torch.Generator().manual_seed(1))
    attention, batch = ReferenceAttention(pool, 4), _decodes(contexts)
    queries = torch.randn(len(contexts), 4, 64, generator=torch.Generator().manual_seed(2))
    keys_values = torch.randn(len(contexts), 4, 64, generator=torch.Generator().manual_seed(3))
    step = attention.prepare(batch)
    assert len(step._groups) == batches
    together = step.attend(0, queries, keys_values)
    for row in range(len(contexts)):
        alone = attention.prepare(
            PackedBatch(
                decodes=1,
                query_tokens=batch.query_tokens[row : row + 1],
                context_tokens=batch.context_tokens[row : row + 1],
                block_table=batch.block_table[row : row + 1],
                slots=batch.slots[row : row + 1],
            )
        ).attend(0, queries[row : row + 1], keys_values[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)
