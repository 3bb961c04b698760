"""Puts a job's ``Constraint`` in place of vLLM's grammars, so that all engines have the same ones.

Both classes have the methods that vLLM's structured outputs call by name, except those for tokens
that are guessed ahead: with speculative decoding the card says that there are no grammars.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.grammar.constraint import Constraint

EndMask = NDArray[np.uint32]
"""Tokens that end a text, as bits: uint32 [vocabulary / 32]."""


def end_mask(vocab_size: int, eos_token_ids: Collection[int]) -> EndMask:
    """Mask of the tokens that may follow a complete text: the end tokens."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in eos_token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


class GrammarState:
    """One text's progress through its grammar."""

    def __init__(self, constraint: Constraint, ends: EndMask) -> None:
        self._constraint = constraint
        self._ends = ends
        self._generated: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Record tokens. Always True: ``Constraint.error`` tells of tokens that break the grammar,
        which vLLM would write to its log."""
        self._generated += tokens
        self._constraint.advance(self._generated)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._generated[-num_tokens:]
            self._constraint.advance(self._generated)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Fill one row of ``bitmask``, a tensor int32 [rows, vocabulary / 32] on the CPU."""
        self._constraint.fill(bitmask[batch_index].numpy().view(np.uint32), self._ends)

    def is_terminated(self) -> bool:
        """Always False: ``fill`` lets a complete text continue with an end token only."""
        return False

    def reset(self) -> None:
        self.rollback(len(self._generated))


class GrammarMasks:
    """Allocates the memory for a step's masks."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        import torch

        return torch.full((max_num_seqs, self._words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing, since nothing is held."""
