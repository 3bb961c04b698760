"""Random shapes for attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.attention import AttentionBackend, KVPool
from worker.attention.choice import TOLERANCE, Trial, error_of, exact, make_trial

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def pool_of(
    blocks: int,
    kv_heads: int,
    dim: int,
    *,
    layers: int = 1,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    rng: np.random.Generator | None = None,
) -> KVPool:
    """With anything in it where there is an ``rng``."""
    pool = KVPool(
        layers=layers,
        blocks=blocks,
        block_tokens=page,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    if rng is not None:
        pool.data.copy_(torch.from_numpy(rng.standard_normal(pool.data.shape, np.float32)))
    return pool


def assert_exact(
    backend: AttentionBackend, pool: KVPool, trial: Trial, windows: Sequence[int]
) -> None:
    """It is right in every layer, each of which has its window."""
    for layer, window in enumerate(windows):
        expected = exact(pool, layer, trial, window)
        error = error_of(backend, layer, trial, expected)
        assert error < TOLERANCE[pool.data.dtype], (layer, trial.batch)


@dataclass
class Case:
    pool: KVPool
    heads: int
    windows: tuple[int, int]
    trial: Trial

    def __str__(self) -> str:
        batch = self.trial.batch
        return (
            f"{self.pool.data.dtype} pool {tuple(self.pool.data.shape)} heads {self.heads}"
            f" windows {self.windows} decodes {batch.decodes} queries {batch.query_tokens}"
            f" contexts {batch.context_tokens}"
        )


def random_case(seed: int, dtype: torch.dtype, device: torch.device, longest: int = 90) -> Case:
    """A pool of two layers with anything in it, and a batch of up to six rows over it."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    shared = int(rng.choice([1, 2, 4, 7, 8]))
    page = int(rng.choice([1, 4, 16, 32]))
    dim = int(rng.choice([16, 24, 64, 80, 128]))
    decodes, chunks = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    if decodes + chunks == 0:
        decodes = 1
    blocks = (decodes + chunks) * -(-longest // page) + 3
    pool = pool_of(blocks, kv_heads, dim, layers=2, page=page, dtype=dtype, device=device, rng=rng)
    contexts = rng.integers(1, longest + 1, decodes).tolist()
    shares = []
    for keys in rng.integers(1, longest + 1, chunks).tolist():
        shares.append((int(rng.integers(1, keys + 1)), keys))
    windows = (0, int(rng.integers(1, longest)))
    return Case(
        pool, kv_heads * shared, windows, make_trial(pool, kv_heads * shared, contexts, shares, rng)
    )
