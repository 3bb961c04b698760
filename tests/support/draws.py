"""Logits of every kind, and which of their tokens a draw may give, in float64."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KINDS = ["flat", "peaked", "few values", "all equal", "small and negative", "crowded", "barred"]


class Way(NamedTuple):
    """How a row is drawn."""

    heat: float = 0.8
    min_p: float = 0.0
    number: float = 0.5
    top_k: int = 0
    top_p: float = 1.0


def kept_of(logits: NDArray[np.float32], way: Way) -> NDArray[np.float64]:
    """Weights in float64, 0 for what is left out."""
    exact = logits.astype(np.float64)
    weights = np.exp((exact - exact.max()) / float(np.float32(way.heat)))
    order = np.lexsort((np.arange(len(weights)), -exact))
    ordered = weights[order]
    most = way.top_k if 0 < way.top_k < len(weights) else len(weights)
    stays = np.arange(len(weights)) < most
    if way.top_p < 1:
        share = float(np.float32(way.top_p)) * ordered[:most].sum()
        stays &= ordered.cumsum() - ordered < share - 1e-9
    stays[0] = True
    kept: NDArray[np.float64] = np.zeros_like(weights)
    kept[order[stays]] = ordered[stays]
    kept[weights < float(np.float32(way.min_p))] = 0
    return kept


def logits_of(kind: str, size: int, lanes: int = 128) -> NDArray[np.float32]:
    """So many, of which a kernel reads as many as it has ``lanes`` at once."""
    rng = np.random.default_rng(2)
    normal: NDArray[np.float32] = rng.standard_normal(size).astype(np.float32)
    found: NDArray[np.float32]
    match kind:
        case "flat":
            found = normal / 8
        case "peaked":
            found = normal * 6
        case "few values":
            found = np.round(normal)
        case "all equal":
            found = np.full(size, -3.0, np.float32)
        case "small and negative":
            found = -np.exp(normal * 9)
        case "crowded":  # as many of the largest in one lane as can be
            at = np.arange(size) % lanes
            found = np.sort(normal)[at.argsort(kind="stable").argsort()]
        case _:  # a grammar barred most, and some are zeros of either sign
            found = np.full(size, -np.inf, np.float32)
            found[[5, 17, 200, 201, 500]] = 1.0, 2.0, 0.0, -0.0, 1.0
    return found
