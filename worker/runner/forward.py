"""Runs a step's packed tokens through the model: all at once, or in tiles of one size.

Kernels choose their summation order by the shape of their input. A token's result thus differs
slightly in a larger batch, sometimes enough to change a word. ``TiledForward`` uses only one shape
(WK-3): every pass has exactly ``TILE_TOKENS`` tokens, each in its own row, from decodes or
prompts::

    packed tokens   a b c d d d d d d d d …        three decodes and a prompt
    tiles           [a b c d d d d d] [d d d …     the last one padded with its last token

This requires that a token's result does not depend on its position in the tile or on the other
tokens. Kernels are written that way, but do not guarantee it: ``check`` tests it on this machine.
"""

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from worker.attention import AttentionBackend, PackedBatch
from worker.attention.fixed import SPAN_TOKENS
from worker.errors import NotDeterministic
from worker.models.model import Decoder
from worker.models.team_steps import LayerSteps, WholeStep
from worker.pinned import upload

TILE_TOKENS: Final = 16
"""Tokens per pass. Measured on a CPU: 8 costs prompts more than it saves a single decode, and 32
does the reverse. It is a multiple of 16, so that no kernel's vector ends within a row."""


class Forward(Protocol):
    """Runs the model and its attention over one step's tokens."""

    def hidden(self, batch: PackedBatch, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Map ``token_ids`` and ``positions`` [tokens] int64 to hidden states [tokens, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [rows, hidden] to float32 logits [rows, vocabulary]."""


class BatchForward:
    """A ``Forward`` that computes all tokens of a step in one pass."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        *,
        max_running: int = 0,
        max_step_tokens: int = 0,
    ) -> None:
        """With the last two arguments, the thread team computes the steps that it supports."""
        self.model = model
        self.attention = attention
        self._team = (
            WholeStep.of(model, attention, max_running),
            LayerSteps.of(model, attention, max_step_tokens),
        )

    def hidden(self, batch: PackedBatch, token_ids: Tensor, positions: Tensor) -> Tensor:
        for steps in self._team:
            if steps is not None and steps.takes(batch):
                return steps.hidden(batch, token_ids, positions)
        return self.model.forward(token_ids, positions, self.attention.prepare(batch))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class TiledForward:
    """A ``Forward`` in passes of one shape; ``attention`` must be a ``FixedAttention``."""

    def __init__(self, model: Decoder, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def hidden(self, batch: PackedBatch, token_ids: Tensor, positions: Tensor) -> Tensor:
        tokens = len(batch.slots)
        row_of = np.repeat(np.arange(len(batch.query_tokens)), batch.query_tokens)
        firsts = batch.query_tokens.cumsum() - batch.query_tokens
        offsets = np.arange(tokens) - firsts[row_of]
        contexts = (batch.context_tokens - batch.query_tokens)[row_of] + offsets + 1
        single = np.ones(TILE_TOKENS, np.int64)
        results = []
        for tile in _tiles(tokens):
            part = PackedBatch(
                decodes=TILE_TOKENS,
                query_tokens=single,
                context_tokens=contexts[tile],
                block_table=batch.block_table[row_of[tile]],
                slots=batch.slots[tile],
            )
            where = upload(tile, token_ids.device)
            step = self._attention.prepare(part)
            results.append(self._model.forward(token_ids[where], positions[where], step))
        return torch.cat(results)[:tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        results = []
        for tile in _tiles(rows):
            where = upload(tile, hidden.device)
            results.append(self._model.logits(hidden[where]))
        return torch.cat(results)[:rows]

    @torch.inference_mode()
    def check(
        self, *, vocab_size: int, block_tokens: int, max_tokens: int, device: torch.device
    ) -> None:
        """Raise ``NotDeterministic`` unless a text's logits are bitwise equal in any batch.

        The text has up to ``max_tokens`` tokens. It overwrites the first blocks of the pool, which
        must be unused.
        """
        draw = np.random.default_rng(0)
        length = min(max_tokens, SPAN_TOKENS + TILE_TOKENS)
        ids = draw.integers(0, vocab_size, length)
        table = np.arange(-(-length // block_tokens))[None]

        def logits_of(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
            """Logits of the text's tokens at ``order``; earlier ones are in the pool or ``order``.

            Each token is its own row, so that tokens may come in any order.
            """
            blocks_of, offsets = order // block_tokens, order % block_tokens
            batch = PackedBatch(
                decodes=len(order),
                query_tokens=np.ones(len(order), np.int64),
                context_tokens=order + 1,
                block_table=np.repeat(table, len(order), axis=0),
                slots=table[0, blocks_of] * block_tokens + offsets,
            )
            packed = torch.from_numpy(ids[order]).to(device)
            hidden = self.hidden(batch, packed, torch.from_numpy(order).to(device))
            return self.logits(hidden)

        whole = logits_of(np.arange(length))
        last = np.arange(max(0, length - TILE_TOKENS), length)
        ways = {
            "alone": [last[:1], last[-1:]],
            "in another place": [draw.permutation(last)],
            "in other company": [np.append(last[-1:], draw.integers(0, length, TILE_TOKENS - 1))],
        }
        for name, orders in ways.items():
            for order in orders:
                if not torch.equal(logits_of(order), whole[torch.from_numpy(order).to(device)]):
                    raise NotDeterministic(
                        f"deterministic mode does not work on {device}: a token that is computed"
                        f" {name} gets other logits; set TIDEGATE_WORKER__DETERMINISTIC=false, or"
                        " use another dtype or another version of torch"
                    )


def _tiles(count: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Indices 0 … ``count`` - 1 in tiles, the last tile padded with the last index."""
    for start in range(0, count, TILE_TOKENS):
        yield np.minimum(np.arange(start, start + TILE_TOKENS), count - 1)
