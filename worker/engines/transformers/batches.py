"""Holds the texts that get their next token together.

``PaddedBatch`` has them in one cache, aligned at their ends::

    [ . . . . t t t t t t ]      . is padding: no query sees it
    [ t t t t t t t t t t ]
    [ . . t t t t t t t t ]

so that one pass appends a column for all. When a text joins, the shorter of it and the others are
padded; when the longest leaves, what is padding for all is cut off. ``SeparateTexts`` makes a pass
for each, for architectures whose state cannot be padded.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.engines.transformers.decoder import Cache, LibraryDecoder


class Texts(Protocol):
    """The texts that a step decodes. ``handles`` are in the order of its rows."""

    @property
    def handles(self) -> list[int]: ...

    def join(self, handle: int, cache: Cache, length: int, shift: int = 0) -> None:
        """Add a text whose prompt of ``length`` tokens is in a cache of its own. ``shift`` is added
        to the positions of what follows."""

    def leave(self, handles: Collection[int]) -> None:
        """Remove texts; unknown ones are ignored. Their memory is free when this returns."""

    def step(self, ids: Sequence[int]) -> Tensor:
        """Append a token to each text; returns the logits after it, float32 [rows, vocabulary]."""


class SeparateTexts:
    """``Texts`` with a cache for each."""

    def __init__(self, decoder: LibraryDecoder) -> None:
        self._decoder = decoder
        self._texts: dict[int, tuple[Cache, int, int]] = {}
        """Caches, lengths and shifts by handle."""

    @property
    def handles(self) -> list[int]:
        return list(self._texts)

    def join(self, handle: int, cache: Cache, length: int, shift: int = 0) -> None:
        self._texts[handle] = cache, length, shift

    def leave(self, handles: Collection[int]) -> None:
        for handle in handles:
            self._texts.pop(handle, None)

    def step(self, ids: Sequence[int]) -> Tensor:
        rows = []
        device = self._decoder.device
        texts = list(self._texts.items())
        for (handle, (cache, length, shift)), token in zip(texts, ids, strict=True):
            positions = torch.tensor([[length + shift]], device=device)
            logits, cache = self._decoder.run(
                torch.tensor([[token]], device=device), cache, positions
            )
            self._texts[handle] = cache, length + 1, shift
            rows.append(logits)
        return torch.cat(rows)


class PaddedBatch:
    """``Texts`` in one cache, padded on the left."""

    def __init__(self, decoder: LibraryDecoder) -> None:
        self._decoder = decoder
        self._cache: Cache = None
        self._handles: list[int] = []
        self._lengths: list[int] = []
        self._shifts: list[int] = []

    @property
    def handles(self) -> list[int]:
        return self._handles

    @property
    def _width(self) -> int:
        return max(self._lengths, default=0)

    @torch.inference_mode()
    def join(self, handle: int, cache: Cache, length: int, shift: int = 0) -> None:
        if not self._handles:
            self._cache = cache
        else:
            width = max(self._width, length)
            for mine, new in zip(self._cache.layers, cache.layers, strict=True):
                if not mine.is_initialized:  # it reads another layer's keys and values
                    continue
                mine.keys = torch.cat((_widened(mine.keys, width), _widened(new.keys, width)))
                mine.values = torch.cat((_widened(mine.values, width), _widened(new.values, width)))
        self._handles.append(handle)
        self._lengths.append(length)
        self._shifts.append(shift)

    @torch.inference_mode()
    def leave(self, handles: Collection[int]) -> None:
        kept = [row for row, handle in enumerate(self._handles) if handle not in handles]
        if len(kept) == len(self._handles):
            return
        self._handles = [self._handles[row] for row in kept]
        self._lengths = [self._lengths[row] for row in kept]
        self._shifts = [self._shifts[row] for row in kept]
        if not kept:
            self._cache = None
            return
        rows = torch.tensor(kept, device=self._decoder.device)
        width = self._width
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys = layer.keys[:, :, -width:].index_select(0, rows)
                layer.values = layer.values[:, :, -width:].index_select(0, rows)

    @torch.inference_mode()
    def step(self, ids: Sequence[int]) -> Tensor:
        device = self._decoder.device
        lengths = torch.tensor(self._lengths, device=device)
        positions = lengths + torch.tensor(self._shifts, device=device)
        self._lengths = [length + 1 for length in self._lengths]
        columns = torch.arange(self._width, device=device)
        mask = (columns >= self._width - 1 - lengths[:, None]).long()
        logits, self._cache = self._decoder.run(
            torch.tensor(ids, device=device)[:, None], self._cache, positions[:, None], mask
        )
        return logits


def _widened(states: Tensor, width: int) -> Tensor:
    """``states`` [rows, heads, tokens, dimension], padded on the left to ``width`` tokens."""
    return pad(states, (0, 0, width - states.shape[2], 0))
