"""DL-15: the number of rows that is decided, compared with fixed ones, on the simulator."""

import pytest

from perf.sim.campaign import CellSpec, RowsPolicy, run_cell
from perf.sim.scenes import drawn_scenes
from tests.support.cases import for_each

pytestmark = pytest.mark.slow

SCENES = {scene.name: scene for scene in drawn_scenes() if scene.engine.slots == 64}


def met(cell: str, rows: int | None, seconds: float) -> float:
    """The share that is met with ``rows`` at once, or as many as are decided on."""
    return run_cell(CellSpec(SCENES[cell], RowsPolicy("ours", rows), 1, seconds)).attainment


@for_each(
    ("cell", "gain", "seconds"),
    [
        ("twice", 1.1, 5.0),
        ("capacity", 0.97, 5.0),
        ("agents", 0.93, 12.0),  # whose prompts are long, and cached but for the last turn
    ],
)
def test_deciding_rows_meets_more_in_overload_and_no_less_at_capacity(
    cell: str, gain: float, seconds: float
) -> None:
    assert met(cell, None, seconds) >= gain * met(cell, 64, seconds)
