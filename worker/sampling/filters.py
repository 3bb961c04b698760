"""Filters the tokens that may be drawn, and weighs them: top-k, then top-p of those, and min-p."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.grammar.masks import Masks
from worker.pinned import upload

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
