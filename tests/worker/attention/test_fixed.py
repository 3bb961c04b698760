"""WK-3: attention that is right, and the same to the bit in any company."""

import numpy as np
import torch

from tests.support.attention_cases import DTYPES, assert_exact, pool_of
from tests.support.cases import for_each
from worker.attention import KVPool, PackedBatch
from worker.attention.choice import Trial, make_trial
from worker.attention.fixed import FixedAttention

WINDOWS = (0, 37, 300)


def random_case(seed: int, dtype: torch.dtype) -> tuple[KVPool, int, Trial]:
    """Up to seven single tokens at positions to beyond three spans, over anything in the pool."""
    rng = np.random.default_rng(seed)
    kv_heads, shared = int(rng.integers(1, 4)), int(rng.choice([1, 2, 7]))
    page, dim = int(rng.choice([1, 4, 16, 32])), int(rng.choice([16, 64, 80, 128]))
    rows = int(rng.integers(1, 8))
    blocks = rows * -(-500 // page) + 3
    pool = pool_of(blocks, kv_heads, dim, layers=len(WINDOWS), page=page, dtype=dtype, rng=rng)
    contexts = rng.integers(1, 500, rows).tolist()
    return pool, kv_heads * shared, make_trial(pool, kv_heads * shared, contexts, [], rng)


@for_each("seed", range(6))
@for_each("dtype", DTYPES)
def test_random_shapes(dtype: torch.dtype, seed: int) -> None:
    pool, heads, trial = random_case(seed, dtype)
    assert_exact(FixedAttention(pool, heads, windows=WINDOWS), pool, trial, WINDOWS)


@for_each("dtype", DTYPES)
@for_each("seed", range(6, 10))
def test_a_token_is_the_same_alone(dtype: torch.dtype, seed: int) -> None:
    """Alone, and wherever it stands among others."""
    pool, heads, trial = random_case(seed, dtype)
    backend = FixedAttention(pool, heads, windows=WINDOWS)
    batch, rows = trial.batch, len(trial.batch.query_tokens)

    def attended(order: np.ndarray, layer: int) -> torch.Tensor:
        part = PackedBatch(
            len(order),
            batch.query_tokens[order],
            batch.context_tokens[order],
            batch.block_table[order],
            batch.slots[order],
        )
        where = torch.from_numpy(order)
        step = backend.prepare(part)
        return step.attend(layer, trial.queries[where], trial.keys_values[where])

    for layer in range(len(WINDOWS)):
        together = attended(np.arange(rows), layer)
        shuffled = np.random.default_rng(seed).permutation(rows)
        assert torch.equal(attended(shuffled, layer), together[torch.from_numpy(shuffled)])
        for row in range(rows):
            assert torch.equal(attended(np.array([row]), layer)[0], together[row])
