"""One text's last query, computed in different steps."""

from collections.abc import Callable

import numpy as np
import torch

from tests.support.attention_cases import pool_of
from worker.attention import AttentionBackend, KVPool, PackedBatch

KEYS, PAGE, BLOCKS = 75, 8, 64


def company_of(
    backend: Callable[[KVPool, int], AttentionBackend], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Outputs [2 layers, heads, head_dim] of the same query by step."""
    kv_heads, heads, dim = 2, 6, 32
    generator = torch.Generator().manual_seed(3)
    text = torch.randn(KEYS, heads + 2 * kv_heads, dim, generator=generator).to(device, dtype)
    other = torch.randn(200, heads + 2 * kv_heads, dim, generator=generator).to(device, dtype)
    outs = []
    for seed, (new, decodes, chunks) in enumerate(
        [
            (1, 0, []),
            (1, 5, []),
            (1, 3, [40]),
            (2, 0, []),
            (30, 2, [9]),
            (KEYS, 0, []),
            (KEYS, 1, [33, 20]),
        ]
    ):
        pool = pool_of(BLOCKS, kv_heads, dim, layers=2, page=PAGE, dtype=dtype, device=device)
        rng = np.random.default_rng(seed)
        free = list(rng.permutation(BLOCKS))
        # Our text is the last of the decodes, or the first of the chunks.
        rows = [(1, int(rng.integers(1, 60))) for _ in range(decodes)]
        rows += [(new, KEYS)] + [(count, count) for count in chunks]
        ours = decodes
        table = np.zeros((len(rows), 12), np.int64)
        slots, tokens, queries = [], [], []
        for row, (count, keys) in enumerate(rows):
            blocks = [free.pop() for _ in range(-(-keys // PAGE))]
            table[row, : len(blocks)] = blocks
            positions = np.arange(keys)
            places = table[row, positions // PAGE] * PAGE + positions % PAGE
            source = text if row == ours else other
            for layer in range(2):
                stored = source[:keys, heads:]
                pool.data[layer].flatten(0, 1)[torch.from_numpy(places).to(device)] = stored
            slots.append(places[keys - count :])
            tokens.append(source[keys - count : keys, heads:])
            queries.append(source[keys - count : keys, :heads])
        counts = np.array([count for count, _ in rows])
        batch = PackedBatch(
            decodes=decodes + (new == 1),
            query_tokens=counts,
            context_tokens=np.array([keys for _, keys in rows]),
            block_table=table,
            slots=np.concatenate(slots),
        )
        step = backend(pool, heads).prepare(batch)
        last = int(counts[: ours + 1].sum()) - 1
        packed = torch.cat(queries), torch.cat(tokens)
        outs.append(torch.stack([step.attend(layer, *packed)[last] for layer in range(2)]))
    return outs
