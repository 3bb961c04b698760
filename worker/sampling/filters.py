"""Changes logits before a draw: penalties and biases, masks, then top-k, top-p of those, and min-p.

Penalties touch the tokens of a text, not the vocabulary: of 150,000 logits per row a few hundred
change. Their tables are on the device, allocated when a first request needs them.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.grammar.masks import Masks
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
        """Enter the current text of ``request``."""
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
        """Change ``rows`` of ``logits``; their texts in ``slots`` have ``positions`` tokens.

        ``last_ids`` are the last tokens of all rows of the step. Ids after the end of a shorter
        text are looked up in that text's marks, so they change nothing more.
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


_NARROW: Final = 256
_WIDE: Final = 1024
"""Number of the largest logits examined: ``_NARROW`` up to a ``top_k`` of 128, otherwise, on the
CPU, this and then all if that was too few. Sorting all of 150,000 takes many times as long there.

A row's own parameters and logits decide this, never other rows: each way rounds a little
differently.
"""
_WORTH_SELECTING: Final = 4
"""Fewest times that the vocabulary exceeds the tokens selected for selecting to beat sorting."""


class Candidates(NamedTuple):
    """Tokens that ``rows`` of a step may draw: ``weights`` [rows, tokens], 0 for those left out.

    ``ids`` [rows, tokens] are the tokens' ids; None: the whole vocabulary in its order.
    """

    rows: NDArray[np.int64]
    weights: Tensor
    ids: Tensor | None


def candidates(
    logits: Tensor,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> Iterator[Candidates]:
    """Yield every row of ``logits`` [rows, vocabulary] once, with the rows filtered like it.

    ``top_p`` is a share of what ``top_k`` left, ``min_p`` a share of the most likely token's
    probability, as in transformers. Of equally likely tokens at the edge of ``top_k`` and
    ``top_p``, those with the lower ids stay (on CUDA not where they are hundreds).
    """
    vocabulary = logits.shape[-1]
    unlimited = (top_k <= 0) | (top_k >= vocabulary)
    limit = np.where(unlimited, vocabulary, top_k)
    filtered = ~unlimited | (top_p < 1)
    on_cpu = logits.device.type == "cpu"
    narrow = limit <= _NARROW // 2
    whole = np.flatnonzero(~filtered)
    if len(whole):
        mine = rows_of(logits, whole)
        yield Candidates(whole, _weights(mine, mine.amax(-1, keepdim=True), min_p[whole]), None)
    for which, width in (
        (filtered & narrow, _NARROW),
        (filtered & ~narrow, _WIDE if on_cpu else vocabulary),
    ):
        rows = np.flatnonzero(which)
        if width * _WORTH_SELECTING > vocabulary:
            width = vocabulary
        while len(rows):
            mine = rows_of(logits, rows)
            values, ids = _largest(mine, width)
            weights = _weights(values, values[:, :1], min_p[rows])
            kept, undecided = _kept(mine, values, limit[rows], top_p[rows])
            weights = weights.masked_fill(~kept, 0.0)
            if undecided is None or not undecided.any():
                yield Candidates(rows, weights, ids)
                break
            decided = np.flatnonzero(~undecided)
            if len(decided):
                yield Candidates(rows[decided], rows_of(weights, decided), rows_of(ids, decided))
            rows, width = rows[undecided], vocabulary


def _kept(
    logits: Tensor, values: Tensor, limit: NDArray[np.int64], top_p: NDArray[np.float32]
) -> tuple[Tensor, NDArray[np.bool_] | None]:
    """Masks of the largest ``values`` that stay [rows, width], and of rows that must examine more.

    The latter is None if no row can, or if finding out would mean waiting for the device.
    """
    device, width = values.device, values.shape[-1]
    limits = upload(limit, device)[:, None]
    share = np.where(top_p < 1, top_p, np.inf).astype(np.float32)
    shares = upload(share, device)[:, None]
    within = torch.arange(width, device=device) < limits
    likeliest = values.masked_fill(~within, -torch.inf)
    total = likeliest.logsumexp(dim=-1, keepdim=True)
    if limit.max() > width:
        total = torch.where(limits > width, logits.logsumexp(dim=-1, keepdim=True), total)
    probabilities = (likeliest - total).exp_()
    # A token stays while what came before it is less than the share; the first always stays.
    kept = within & (probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities < shares)
    kept[:, 0] = True
    if width == logits.shape[-1] or device.type != "cpu":
        return kept, None
    # If the last one kept is as likely as the last examined, more may have to stay.
    edge = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    undecided: NDArray[np.bool_] = (edge == values[:, -1:]).squeeze(1).numpy()
    return kept, undecided


def _weights(values: Tensor, largest: Tensor, min_p: NDArray[np.float32]) -> Tensor:
    """Probabilities relative to the most likely token's, 0 where that is less than ``min_p``."""
    weights = (values - largest).exp_()
    if min_p.any():
        floors = upload(min_p, values.device)
        weights = weights.masked_fill_(weights < floors[:, None], 0.0)
    return weights


def _largest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row, descending, and their ids; equals by ascending id."""
    if width == logits.shape[-1]:
        if logits.device.type != "cpu":
            return logits.sort(dim=-1, descending=True, stable=True)
        ids = torch.arange(width).expand_as(logits)
    else:
        ids = logits.topk(width, dim=-1, sorted=False).indices
    values = logits.gather(1, ids)
    if values.device.type == "cpu":
        ids = _by_value(values.numpy(), ids.numpy())
        return logits.gather(1, ids), ids
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _by_value(values: NDArray[np.float32], ids: NDArray[np.int64]) -> Tensor:
    """``ids`` [rows, width] by descending value, equals ascending: many times as fast as torch.

    One sort of integers: the high half has the bits of the value, which order like the value itself
    once those of negative ones are inverted; the low half has the id.
    """
    bits = values.view(np.int32)
    ascending = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    keys = (~ascending).astype(np.int64) << 32 | ids
    keys.sort(axis=-1)
    return torch.from_numpy(keys & 0xFFFFFFFF)


def rows_of(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """``rows`` of ``tensor``; itself, not a copy, when they are all of them."""
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
