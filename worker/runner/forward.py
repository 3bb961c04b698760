"""Passes a step's packed tokens through the model: all at once, or in tiles of one size.

Kernels choose their order of summation by the shape of their input, so that a token's result
differs a little in a larger batch, and sometimes that is enough for another word. ``TiledForward``
gives them one shape only (WK-3): every pass has exactly ``TILE_TOKENS`` tokens, each its own row, a
decode or part of a prompt::

    packed tokens   a b c d d d d d d d d …        three decodes and a prompt
    tiles           [a b c d d d d d] [d d d …     the last one filled up with its last token

This relies on a token's result not depending on its place in the tile nor on the others there.
Kernels are written that way, but without a guarantee: ``check`` tries it on the machine at hand.
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
"""Tokens of a pass. Measured on a CPU: 8 costs prompts more than it saves a single decode, 32 the
reverse. A multiple of 16, so that no kernel's vector ends within a row."""


class Forward(Protocol):
    """The model with its attention, over one step's tokens."""

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
        """With the last two, steps are done by the team of threads where they can be."""
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
    """A ``Forward`` in passes of one shape; ``attention`` must be such (``FixedAttention``)."""

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

        The text has up to ``max_tokens`` and overwrites the first blocks of the pool, which must be
        unused.
        """
        draw = np.random.default_rng(0)
        length = min(max_tokens, SPAN_TOKENS + TILE_TOKENS)
        ids = draw.integers(0, vocab_size, length)
        table = np.arange(-(-length // block_tokens))[None]

        def logits_of(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
            """Logits of the text's tokens at ``order``; earlier ones are in the pool or among them.

            Each token is a row of its own, so that they may come in any order.
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
                        f"deterministic mode cannot be had on {device}: a token that is computed"
                        f" {name} gets other logits; set TIDEGATE_WORKER__DETERMINISTIC=false, or"
                        " use another dtype or version of torch"
                    )


def _tiles(count: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Indices 0 … ``count`` - 1 in tiles, the last tile padded with the last index."""
    for start in range(0, count, TILE_TOKENS):
        yield np.minimum(np.arange(start, start + TILE_TOKENS), count - 1)
