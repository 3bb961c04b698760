"""Changes logits before a draw: penalties and biases, masks, then top-k, top-p of the rest, min-p.

Penalties change the logits of a text's tokens, a few hundred of 150,000 per row. Their tables are
on the device; the first request that needs them allocates them.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from worker.grammar.masks import Masks
from worker.pinned import upload
from worker.scheduler.request import Request

DRAWS: Final = 1
PENALISED: Final = 2
BIASED: Final = 4
WANTS_LOGPROBS: Final = 8
CONSTRAINED: Final = 16

_COLDEST: Final = 1e-5
"""Temperature below which a row is greedy, which is nearly exact; lower ones overflow logits."""


class SamplingTable:
    """Parameters as arrays [slots]; see ``Sampling`` for the parameters with its names."""

    def __init__(self, slots: int) -> None:
        self.needs = np.zeros(slots, np.uint8)
        """The parts of the pass that a row needs besides the argmax: the flags above, ORed."""
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.penalties = np.zeros((slots, 3), np.float32)
        """Repetition, presence and frequency penalty."""
        self.seed = np.zeros(slots, np.uint64)
        self.logprobs = np.zeros(slots, np.int64)
        self.first_free_position = np.zeros(slots, np.int64)
        """First position at which an end token may come (``min_tokens``)."""

    def fill(self, slot: int, request: Request) -> int:
        """Store the parameters of ``request``. Returns its ``needs``."""
        asked = request.job.sampling
        self.temperature[slot] = asked.temperature
        self.top_k[slot] = asked.top_k
        self.top_p[slot] = asked.top_p
        self.min_p[slot] = asked.min_p
        penalties = asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty
        self.penalties[slot] = penalties
        self.seed[slot] = request.seed
        self.logprobs[slot] = asked.logprobs or 0
        # A grammar may allow only the end token: then masks handle ``min_tokens``.
        least = 0 if request.job.constraint is not None else asked.min_tokens
        self.first_free_position[slot] = request.prompt_tokens + least
        needs = (
            (DRAWS if asked.temperature >= _COLDEST else 0)
            | (PENALISED if penalties != (1, 0, 0) else 0)
            | (BIASED if asked.logit_bias else 0)
            | (WANTS_LOGPROBS if asked.logprobs is not None else 0)
            | (CONSTRAINED if request.job.constraint is not None else 0)
        )
        self.needs[slot] = needs
        return needs


_IN_PROMPT: Final = 1
_ONCE_IN_ANSWER: Final = 2


class Penalties:
    """Repetition, presence and frequency penalties; see ``Sampling`` for the formulas.

    ::

        texts [slots, max_tokens]  each text's token ids so far, then stale values
        marks [slots, vocabulary]  bit 0: in the prompt; the bits above: how often in the answer

    A step's token is recorded at the start of the next step, when it arrives as that step's last
    input: a failed step that is retried counts no token twice.
    """

    def __init__(self, slots: int, vocab_size: int, max_tokens: int, device: torch.device) -> None:
        self._shapes = (slots, max_tokens), (slots, vocab_size)
        self._device = device
        self._texts: Tensor | None = None
        self._marks: Tensor | None = None
        self._known = np.zeros(slots, np.int64)
        self._requests: list[Request | None] = [None] * slots

    def begin(self, slot: int, request: Request) -> None:
        """Store the current text of ``request``."""
        texts, marks = self._tables()
        ids = self._upload(np.array(request.tokens, np.int64))
        prompt = request.prompt_tokens - request.job.begun_tokens
        texts[slot, : len(ids)] = ids
        marks[slot] = 0
        marks[slot].index_fill_(0, ids[:prompt], _IN_PROMPT)
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
        """Change ``rows`` of ``logits``; their texts in ``slots`` have ``positions`` tokens.

        ``last_ids`` are the last tokens of all rows of the step. Stale ids after the end of a
        shorter text are looked up in that text's marks, so they change nothing else.
        """
        texts, marks = self._tables()
        self._catch_up(rows, slots, positions, last_ids)
        row, slot = self._upload(rows)[:, None], self._upload(slots)[:, None]
        repetition, presence, frequency = self._upload(table.penalties[slots]).T[:, :, None]
        ids = texts[slot.squeeze(1), : int(positions.max())].long()
        marked = marks[slot, ids]
        old = logits[row, ids]
        repeated = torch.where(old > 0, old / repetition, old * repetition)
        new = torch.where(marked > 0, repeated, old)
        count = (marked >> 1).float()
        new -= frequency * count + presence * (count > 0)
        # A repeated id is written twice with the same value.
        logits[row, ids] = new

    def _catch_up(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        last_ids: Tensor,
    ) -> None:
        """Store each text's last token, unless it is stored already."""
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
        """Store ``biases`` for ``slot``."""
        count = len(biases)
        if (more := count - self._ids.shape[1]) > 0:
            self._ids, self._values = pad(self._ids, (0, more)), pad(self._values, (0, more))
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


def kept_(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set ``weights`` [rows, vocabulary], relative to the likeliest token's, to 0 if the filters
    [rows] exclude a token, and return them. Does not wait.

    ``top_p`` is a share of the probability left by ``top_k``; ``min_p`` is a share of the most
    likely token's probability, as in transformers. Of equally likely tokens at the edge of
    ``top_k`` and ``top_p``, those with lower ids stay.
    """
    vocabulary = weights.shape[-1]
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    stays = torch.arange(vocabulary, device=weights.device) < limit
    sums = (ordered * stays).cumsum(dim=-1, dtype=torch.float64)
    # A token stays while the sum before it is less than the share; the first always stays.
    share = torch.where(top_p < 1, top_p * sums[:, -1], torch.inf)
    stays &= sums - ordered < share[:, None]
    stays[:, 0] = True
    left_out = ~torch.zeros_like(stays).scatter_(1, ids, stays)
    return weights.masked_fill_(left_out | (weights < min_p[:, None]), 0.0)


def rows_of(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """``rows`` of ``tensor``; the tensor itself, not a copy, if they are all of its rows."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[upload(rows, tensor.device)]


def apply_masks_(logits: Tensor, masks: Masks) -> None:
    """Mask the rows of ``logits`` [rows, vocabulary] that are in ``masks``."""
    if logits.device.type == "cpu":
        _apply_on_cpu(logits.numpy(), masks)
        return
    rows = upload(masks.rows, logits.device)
    words = upload(masks.words.view(np.int32), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    barred = ((words[:, :, None] >> bits) & 1).reshape(len(rows), -1) == 0
    mine = logits[rows].masked_fill_(barred[:, : logits.shape[-1]], -torch.inf)
    logits.index_copy_(0, rows, mine)


def _apply_on_cpu(logits: NDArray[np.float32], masks: Masks) -> None:
    for row, words in zip(masks.rows, masks.words, strict=True):
        bits = np.unpackbits(words.view(np.uint8), count=logits.shape[-1], bitorder="little")
        np.copyto(logits[row], -np.inf, where=bits == 0)
