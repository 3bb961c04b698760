"""Draws on the CPU, compiled and by torch, against the definition, in float64."""

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.cases import for_each
from worker.cpu_kernels import attention_loops, draw_loops
from worker.cpu_kernels.draws import draw_rows
from worker.sampling.sampler import draw_plain

VOCABULARY = 1003
FILTERS = [
    (0, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.0, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.999999, 0.0),
    (40, 1.0, 0.0),
    (1, 1.0, 0.0),
    (700, 0.5, 0.0),
    (VOCABULARY, 0.7, 0.02),
    (0, 1.0, 0.3),
    (0, 0.0, 1.0),
]


def logits_of(kind: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(2)
    match kind:
        case "flat":
            return rng.standard_normal(VOCABULARY).astype(np.float32)
        case "peaked":
            return (rng.standard_normal(VOCABULARY) * 9).astype(np.float32)
        case "few values":
            return rng.integers(0, 3, VOCABULARY).astype(np.float32)
        case "all equal":
            return np.zeros(VOCABULARY, np.float32)
        case _:  # most are barred
            barred = np.full(VOCABULARY, -np.inf, np.float32)
            barred[[5, 17, 900]] = 1.0, 2.0, 1.0
            return barred


def kept_of(
    logits: NDArray[np.float32], heat: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Weights, 0 for what is left out."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / heat)
    order = np.lexsort((np.arange(len(weights)), -weights))
    sorted_weights = weights[order]
    most = top_k if 0 < top_k < len(weights) else len(weights)
    before = sorted_weights.cumsum() - sorted_weights
    stays = np.arange(len(weights)) < most
    if top_p < 1:
        # Whole weights are summed, and compared with room for float32's.
        stays &= before < top_p * sorted_weights[:most].sum() - 1e-9
    stays[0] = True
    kept = np.zeros_like(weights)
    kept[order[stays]] = sorted_weights[stays]
    kept[weights < min_p] = 0
    return kept


@for_each("kind", ["flat", "peaked", "few values", "all equal", "barred"])
@for_each("filters", FILTERS)
@for_each("is_compiled", [True, False])
def test_draws_are_those_of_the_definition(
    kind: str, filters: tuple[int, float, float], is_compiled: bool
) -> None:
    """WK-8: of equal tokens at the edge those with the lower ids stay."""
    top_k, top_p, min_p = filters
    logits, heat, rows = logits_of(kind), 0.8, 400
    draws = ((np.arange(rows) + 0.5) / rows).astype(np.float32)
    repeated = np.tile(logits, (rows, 1))
    heats, least, shares = (np.full(rows, each, np.float32) for each in (heat, min_p, top_p))
    most = np.full(rows, top_k)
    if is_compiled:
        drawn = draw_rows(repeated, heats, least, most, shares, draws, threads=2)
    else:
        chances = np.stack((heats, least, draws, most.astype(np.float32), shares))
        nothing = torch.zeros(rows, dtype=torch.int64)
        given = torch.from_numpy(repeated), nothing, torch.from_numpy(chances)
        drawn = draw_plain(*given, is_filtered=True).numpy()
    kept = kept_of(logits, float(np.float32(heat)), top_k, float(np.float32(top_p)), min_p)
    cumulative = kept.cumsum()
    expected = np.searchsorted(cumulative, draws * cumulative[-1], side="right")
    # One token more or less at the edge, or a draw at a border, is rounding.
    assert (kept[drawn] > 0).mean() > 0.99
    assert (drawn == expected).mean() > 0.97


def test_what_is_kept_on_disk_is_found_by_the_next_process() -> None:
    """numba takes closures as part of the key: nothing in them may be a process's own."""
    tasks = (
        draw_loops.draw(),
        attention_loops.attend(6, 2, 16, 3, False),
        attention_loops.merge(6, 16, False),
    )
    for task in tasks:
        for cell in task.function.__closure__ or ():
            value = cell.cell_contents
            assert isinstance(value, (int, float, np.floating)) or "numba" in type(value).__module__
            assert not callable(getattr(value, "py_func", None))
            assert type(value).__name__ != "_Intrinsic"
