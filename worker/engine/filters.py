"""Which tokens may be drawn at all: top-k, then top-p of those, and min-p."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NARROW: Final = 64
"""Up to this ``top_k`` the largest logits are selected, beyond it all are sorted.

A row's own parameters decide it, never its company's: the two differ in their rounding.
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
    narrow = limit <= _NARROW
    wide = ~narrow & (~unlimited | (top_p < 1))
    floors = _floors(logits, min_p)  # before -inf stands anywhere
    for rows, width in ((narrow, min(_NARROW, vocabulary)), (wide, vocabulary)):
        if rows.any():
            chosen = np.flatnonzero(rows)
            _keep_likeliest_(logits, chosen, width, limit[chosen], top_p[chosen])
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
) -> None:
    device = logits.device
    whole = len(rows) == len(logits)
    where = torch.from_numpy(rows).to(device, non_blocking=True)
    mine = logits if whole else logits[where]
    ordered = _largest(mine, width)
    share = np.where(top_p < 1, top_p, np.inf).astype(np.float32)
    limits = torch.from_numpy(limit).to(device, non_blocking=True)[:, None]
    shares = torch.from_numpy(share).to(device, non_blocking=True)[:, None]
    beyond = torch.arange(width, device=device) >= limits
    probabilities = ordered.masked_fill(beyond, -torch.inf).softmax(dim=-1)
    # A token stays while what came before it is less than the share; the first always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (~beyond & (before < shares)).sum(dim=-1, keepdim=True).clamp_(min=1)
    edge = ordered.gather(1, kept - 1)
    at_edge = mine == edge
    places_at_edge = kept - (mine > edge).sum(dim=-1, keepdim=True)
    left_out = (mine < edge) | (at_edge & (at_edge.cumsum(dim=-1) > places_at_edge))
    if whole:
        logits.masked_fill_(left_out, -torch.inf)
    else:
        logits[where] = mine.masked_fill(left_out, -torch.inf)


def _largest(logits: Tensor, width: int) -> Tensor:
    """The ``width`` largest of each row, descending."""
    if width < logits.shape[-1]:
        return logits.topk(width, dim=-1).values
    if logits.device.type == "cpu":  # numpy's sort is ten times faster than torch's there
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(dim=-1, descending=True).values
