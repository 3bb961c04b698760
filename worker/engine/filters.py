"""Which tokens may be drawn at all: top-k, then top-p of those, and min-p."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NARROW: Final = 64
_WIDE: Final = 1024
"""How many of the largest logits are looked at: up to a ``top_k`` of 64 so many, else, on the CPU,
1024 and then all if that was too few. Sorting all of 150,000 takes seven times as long there.

A row's own parameters and logits decide it, never its company: each rounds a little differently.
"""


def leave_out_(
    logits: Tensor,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> None:
    """Put -inf where a token of ``logits`` [rows, vocabulary] must not be drawn.

    ``top_p`` is a share of what ``top_k`` left, ``min_p`` a share of the most likely token's
    probability, as in transformers. Of equally likely tokens at the edge of ``top_k`` and
    ``top_p``, those with the lower ids stay. A row without a filter keeps every token.
    """
    vocabulary = logits.shape[-1]
    unlimited = (top_k <= 0) | (top_k >= vocabulary)
    limit = np.where(unlimited, vocabulary, top_k)
    filtered = ~unlimited | (top_p < 1)
    floors = _floors(logits, min_p)  # before -inf stands anywhere
    for rows, width in (
        (filtered & (limit <= _NARROW), _NARROW),
        (filtered & (limit > _NARROW), _WIDE if logits.device.type == "cpu" else vocabulary),
    ):
        chosen = np.flatnonzero(rows)
        while len(chosen):
            undecided = _keep_likeliest_(logits, chosen, width, limit[chosen], top_p[chosen])
            chosen, width = chosen[undecided], vocabulary
    if floors is not None:
        logits.masked_fill_(logits < floors, -torch.inf)


def _floors(logits: Tensor, min_p: NDArray[np.float32]) -> Tensor | None:
    """Least logits [rows, 1] that ``min_p`` lets through."""
    if not min_p.any():
        return None
    with np.errstate(divide="ignore"):
        distance = torch.from_numpy(np.log(min_p)).to(logits.device, non_blocking=True)
    return logits.amax(dim=-1, keepdim=True) + distance[:, None]


def _keep_likeliest_(
    logits: Tensor,
    rows: NDArray[np.int64],
    width: int,
    limit: NDArray[np.int64],
    top_p: NDArray[np.float32],
) -> NDArray[np.int64]:
    """Filter ``rows`` by their ``width`` most likely tokens; which of them need more, on the CPU.

    On other devices ``width`` is to be large enough for all: asking would wait for the device.
    """
    device = logits.device
    width = min(width, logits.shape[-1])
    whole = len(rows) == len(logits)
    where = torch.from_numpy(rows).to(device, non_blocking=True)
    mine = logits if whole else logits[where]
    ordered = _largest(mine, width)
    share = np.where(top_p < 1, top_p, np.inf).astype(np.float32)
    limits = torch.from_numpy(limit).to(device, non_blocking=True)[:, None]
    shares = torch.from_numpy(share).to(device, non_blocking=True)[:, None]
    beyond = torch.arange(width, device=device) >= limits
    likeliest = ordered.masked_fill(beyond, -torch.inf)
    total = likeliest.logsumexp(dim=-1, keepdim=True)
    if width < limit.max():
        total = torch.where(limits > width, mine.logsumexp(dim=-1, keepdim=True), total)
    probabilities = (likeliest - total).exp_()
    # A token stays while what came before it is less than the share; the first always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (~beyond & (before < shares)).sum(dim=-1, keepdim=True).clamp_(min=1)
    edge = ordered.gather(1, kept - 1)
    at_edge = mine == edge
    places_at_edge = kept - (mine > edge).sum(dim=-1, keepdim=True)
    left_out = (mine < edge) | (at_edge & (at_edge.cumsum(dim=-1) > places_at_edge))
    undecided = np.zeros(0, np.int64)
    if width < limit.max():
        open_ended = (kept == width) & (limits > width)
        undecided = np.flatnonzero(open_ended.squeeze(1).numpy())
        left_out &= ~open_ended
    if whole:
        logits.masked_fill_(left_out, -torch.inf)
    else:
        logits[where] = mine.masked_fill(left_out, -torch.inf)
    return undecided


def _largest(logits: Tensor, width: int) -> Tensor:
    """The ``width`` largest of each row, descending."""
    if width < logits.shape[-1]:
        return logits.topk(width, dim=-1).values
    if logits.device.type == "cpu":  # numpy's sort is ten times faster than torch's there
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(dim=-1, descending=True).values
