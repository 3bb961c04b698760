"""A job's ``Constraint`` in the place of one of vLLM's grammars, so that all engines have the same.

Both classes have the methods that vLLM's structured outputs ask for by name, but those for tokens
that are guessed ahead: with speculative decoding the card says that there are no grammars.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.grammar.constraint import Constraint

EndMask = NDArray[np.uint32]
"""[vocabulary / 32], a bit for each token: those that end a text."""


def end_mask(vocab_size: int, eos_token_ids: Collection[int]) -> EndMask:
    """What may follow a text that is complete."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in eos_token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


class GrammarState:
    """What one text has of its grammar."""

    def __init__(self, constraint: Constraint, ends: EndMask) -> None:
        self._constraint = constraint
        self._ends = ends
        self._generated: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Always true: what leaves the grammar shows in ``Constraint.error``, and vLLM would write
        such tokens to its log."""
        self._generated += tokens
        self._constraint.advance(self._generated)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._generated[-num_tokens:]
            self._constraint.advance(self._generated)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """``bitmask``: tensor [rows, vocabulary / 32] int32 on the CPU."""
        self._constraint.fill(bitmask[batch_index].numpy().view(np.uint32), self._ends)

    def is_terminated(self) -> bool:
        """Never: a text that is complete may go on with its end token only, which ``fill`` says."""
        return False

    def reset(self) -> None:
        self.rollback(len(self._generated))


class GrammarMasks:
    """The memory for a step's masks."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        import torch

        return torch.full((max_num_seqs, self._words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Nothing is held."""
