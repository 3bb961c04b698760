"""Makes the masks of a step's rows on a thread while the model computes."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.grammar.constraint import Constraint


class MaskedRow(NamedTuple):
    """A row of a step that samples under a constraint."""

    row: int
    """Index among the rows that sample."""
    constraint: Constraint
    generated: Sequence[int]
    bars_end: bool
    """Whether ``min_tokens`` is not reached: end tokens are barred if others may come."""


class Masks(NamedTuple):
    """Masks of ``rows``: ``words`` [rows, vocabulary / 32] uint32, one bit per allowed token."""

    rows: NDArray[np.int64]
    words: NDArray[np.uint32]


class MaskMaker:
    """Makes masks for one runner. Used by its thread."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._words = -(-vocab_size // 32)
        self._end = np.zeros(self._words, np.uint32)
        for token in eos_token_ids:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, rows: Sequence[MaskedRow]) -> "Future[Masks]":
        """Start making the masks on a thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tidegate-masks")
        return self._thread.submit(self.make, rows)

    def make(self, rows: Sequence[MaskedRow]) -> Masks:
        """Advance each row's constraint by its latest tokens; return which tokens may follow."""
        words = np.empty((len(rows), self._words), np.uint32)
        for out, one in zip(words, rows, strict=True):
            one.constraint.advance(one.generated)
            one.constraint.fill(out, self._end)
            if one.bars_end:
                others = out & ~self._end
                if others.any():
                    out[:] = others
        return Masks(np.array([one.row for one in rows], np.int64), words)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
