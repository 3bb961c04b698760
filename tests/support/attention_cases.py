"""Random shapes for attention backends."""

from dataclasses import dataclass

import numpy as np
import torch

from worker.attention import KVPool
from worker.attention.choice import Trial, make_trial

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    pool = KVPool(
        layers=2,
        blocks=(decodes + chunks) * -(-longest // page) + 3,
        block_tokens=page,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    pool.data.copy_(torch.from_numpy(rng.standard_normal(pool.data.shape, np.float32)))
    contexts = rng.integers(1, longest + 1, decodes).tolist()
    shares = []
    for keys in rng.integers(1, longest + 1, chunks).tolist():
        shares.append((int(rng.integers(1, keys + 1)), keys))
    windows = (0, int(rng.integers(1, longest)))
    return Case(
        pool, kv_heads * shared, windows, make_trial(pool, kv_heads * shared, contexts, shares, rng)
    )
