"""Draws on the CPU, compiled and by torch, against the definition, in float64."""

import numpy as np
import torch

from tests.support.cases import for_each
from tests.support.draws import KINDS, Way, kept_of, logits_of
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


@for_each("kind", [kind for kind in KINDS if kind != "small and negative"])
@for_each("filters", FILTERS)
@for_each("is_compiled", [True, False])
def test_draws_are_those_of_the_definition(
    kind: str, filters: tuple[int, float, float], is_compiled: bool
) -> None:
    """WK-8: of equal tokens at the edge those with the lower ids stay. Tokens are equal here where
    their weights in float32 are, as most that are small and negative have."""
    top_k, top_p, min_p = filters
    logits, heat, rows = logits_of(kind, VOCABULARY), 0.8, 400
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
    kept = kept_of(logits, Way(heat, min_p, top_k=top_k, top_p=top_p))
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
