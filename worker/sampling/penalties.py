"""Applies penalties and biases: sparse changes to the logits, from tables with a row per slot.

A step touches the tokens of a text, not the vocabulary: of 150,000 logits per row a few hundred
change. The tables are on the device, allocated when a first request needs them.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.pinned import upload
from worker.sampling.params import SamplingTable
from worker.scheduler.request import Request

_IN_PROMPT: Final = 1
_ONCE_IN_ANSWER: Final = 2


class Penalties:
    """Repetition, presence and frequency penalties; see ``Sampling`` for the formulas.

    ::

        texts [slots, max_tokens]  the token ids of each text so far, then whatever was there before
        marks [slots, vocabulary]  bit 0: in the prompt; the bits above: how often in the answer

    A step's token is entered at the beginning of the next step, when it comes in as that step's
    last input: a step that failed and is tried again counts nothing twice.
    """

    def __init__(self, slots: int, vocab_size: int, max_tokens: int, device: torch.device) -> None:
        self._shapes = (slots, max_tokens), (slots, vocab_size)
        self._device = device
        self._texts: Tensor | None = None
        self._marks: Tensor | None = None
        self._known = np.zeros(slots, np.int64)
        self._requests: list[Request | None] = [None] * slots

    def begin(self, slot: int, request: Request) -> None:
        """Enter the text of ``request`` as it stands."""
        texts, marks = self._tables()
        ids = self._upload(np.array(request.tokens, np.int64))
        prompt = request.prompt_tokens - request.job.begun_tokens
        texts[slot, : len(ids)] = ids
        marks[slot] = 0
        marks[slot, ids[:prompt]] = _IN_PROMPT
        answer = ids[prompt:]
        marks[slot].index_add_(0, answer, torch.full_like(answer, _ONCE_IN_ANSWER).int())
        self._known[slot] = len(ids)
        self._requests[slot] = request

    def apply_(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        last_ids: Tensor,
        table: SamplingTable,
    ) -> None:
        """Change ``rows`` of ``logits``, whose texts in ``slots`` have ``positions`` tokens.

        ``last_ids`` are the last tokens of all rows of the step. Ids behind the end of a shorter
        text are looked up in that text's marks too, so that they change nothing more.
        """
        texts, marks = self._tables()
        self._catch_up(rows, slots, positions, last_ids)
        row, slot = self._upload(rows)[:, None], self._upload(slots)[:, None]
        factors = np.stack(
            (
                table.repetition_penalty[slots],
                table.presence_penalty[slots],
                table.frequency_penalty[slots],
            )
        )
        repetition, presence, frequency = self._upload(factors)[:, :, None]
        ids = texts[slot.squeeze(1), : int(positions.max())].long()
        marked = marks[slot, ids]
        old = logits[row, ids]
        repeated = torch.where(old > 0, old / repetition, old * repetition)
        new = torch.where(marked > 0, repeated, old)
        count = (marked >> 1).float()
        new -= frequency * count + presence * (count > 0)
        # An id that occurs twice is written twice, with the same value.
        logits[row, ids] = new

    def _catch_up(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        last_ids: Tensor,
    ) -> None:
        """Enter each text's last token, unless it is known."""
        texts, marks = self._tables()
        missing = positions - self._known[slots]
        for slot in slots[missing > 1].tolist():  # more than one token is new
            request = self._requests[slot]
            assert request is not None
            self.begin(slot, request)
        new = np.flatnonzero(missing == 1)
        if not len(new):
            return
        slot, ids = self._upload(slots[new]), last_ids[self._upload(rows[new])]
        texts[slot, self._upload(positions[new] - 1)] = ids.int()
        once = torch.full((len(new),), _ONCE_IN_ANSWER, dtype=torch.int32, device=self._device)
        marks.index_put_((slot, ids), once, accumulate=True)
        self._known[slots[new]] = positions[new]

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._texts is None or self._marks is None:
            texts, marks = self._shapes
            self._texts = torch.zeros(texts, dtype=torch.int32, device=self._device)
            self._marks = torch.zeros(marks, dtype=torch.int32, device=self._device)
        return self._texts, self._marks

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return upload(array, self._device)


class Biases:
    """``logit_bias`` of each slot: ids and values, padded with additions of 0 to token 0."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._counts = np.zeros(slots, np.int64)
        self._ids = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self._values = torch.zeros((slots, 0), device=device)

    def begin(self, slot: int, biases: tuple[tuple[int, float], ...]) -> None:
        """Enter ``biases`` for ``slot``."""
        count = len(biases)
        self._grow(count)
        ids, values = zip(*biases, strict=True)
        self._ids[slot] = 0
        self._ids[slot, :count] = upload(np.array(ids, np.int64), self._device)
        self._values[slot] = 0
        self._values[slot, :count] = upload(np.array(values, np.float32), self._device)
        self._counts[slot] = count

    def add_(self, logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Add the biases of ``slots`` to ``rows`` of ``logits``."""
        width = int(self._counts[slots].max())
        slot = upload(slots, self._device)
        row = upload(rows, self._device)
        ids, values = self._ids[slot, :width], self._values[slot, :width]
        logits.index_put_((row[:, None].expand_as(ids), ids), values, accumulate=True)

    def _grow(self, width: int) -> None:
        more = width - self._ids.shape[1]
        if more > 0:
            pad = (0, more)
            self._ids = torch.nn.functional.pad(self._ids, pad)
            self._values = torch.nn.functional.pad(self._values, pad)
