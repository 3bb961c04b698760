"""A model with its pool, driven without an engine."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.support.attention_cases import pool_of
from worker.attention import PackedBatch
from worker.attention.reference import ReferenceAttention
from worker.models.config import read_config
from worker.models.loader import Layout
from worker.models.model import load_model

CPU = torch.device("cpu")
BLOCK_TOKENS = 4


@dataclass
class Text:
    """A text in the pool: its ids, its blocks, and how much of it is computed."""

    ids: list[int]
    blocks: list[int]
    computed: int = 0


class Rig:
    def __init__(
        self,
        path: Path,
        device: torch.device = CPU,
        *,
        dtype: torch.dtype = torch.float32,
        layout: Layout | None = None,
        blocks: int = 128,
    ) -> None:
        config = read_config(path)
        self.device = device
        self.model = load_model(path, config, dtype, device, layout)
        self.pool = pool_of(
            blocks,
            config.num_kv_heads,
            config.head_dim,
            layers=config.num_layers,
            page=BLOCK_TOKENS,
            dtype=dtype,
            device=device,
        )
        self.attention = ReferenceAttention(self.pool, config.num_heads, windows=config.windows)
        self._free = list(np.random.default_rng(1).permutation(blocks))

    def text(self, ids: list[int]) -> Text:
        count = -(-len(ids) // BLOCK_TOKENS)
        return Text(ids, [int(self._free.pop()) for _ in range(count)])

    @torch.inference_mode()
    def step(self, *shares: tuple[Text, int]) -> list[torch.Tensor]:
        """Compute ``count`` more tokens of each text → logits [count, vocabulary] of each.

        As in a plan, single tokens come first.
        """
        counts = np.array([count for _, count in shares])
        starts = np.array([text.computed for text, _ in shares])
        width = max(len(text.blocks) for text, _ in shares)
        table = np.array([text.blocks + [0] * (width - len(text.blocks)) for text, _ in shares])
        ids, positions, slots = [], [], []
        for row, (text, count) in enumerate(shares):
            span = np.arange(text.computed, text.computed + count)
            ids += text.ids[text.computed : text.computed + count]
            positions.append(span)
            slots.append(table[row, span // BLOCK_TOKENS] * BLOCK_TOKENS + span % BLOCK_TOKENS)
            text.computed += count
        decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
        batch = PackedBatch(decodes, counts, starts + counts, table, np.concatenate(slots))
        hidden = self.model.forward(
            torch.tensor(ids, device=self.device),
            torch.from_numpy(np.concatenate(positions)).to(self.device),
            self.attention.prepare(batch),
        )
        return list(self.model.logits(hidden).cpu().split(counts.tolist()))
