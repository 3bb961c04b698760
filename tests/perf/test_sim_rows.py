"""The simulator: the decided number of rows (DL-15) and an H100's step times, compared."""

import random
from dataclasses import dataclass

import pytest

from perf.load.trace import CODE, Manner, TraceLoad, TraceRow
from perf.sim.arrivals import SimArrival, trace_arrivals
from perf.sim.campaign import CellSpec, RowsPolicy, run_cell
from perf.sim.scenes import ENGINES, SimScene, drawn_scenes
from tests.support.cases import for_each

pytestmark = pytest.mark.slow

SCENES = {scene.name: scene for scene in drawn_scenes() if scene.engine.slots == 64}

H100 = ENGINES["h100-29"]


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


@dataclass(frozen=True, slots=True)
class Completions:
    """Code completions like those of Azure's trace."""

    per_s: float

    def arrivals(self, seconds: float, seed: int) -> list[SimArrival]:
        rng, speed = random.Random(seed), H100.speed
        sizes = [(rng.lognormvariate(7.4, 0.7), rng.lognormvariate(2.8, 0.9)) for _ in range(999)]
        rows = [TraceRow(float(i), int(each[0]), int(each[1])) for i, each in enumerate(sizes)]
        load = TraceLoad(rows, speed, Manner.CONSTANT, True, CODE, prompt_scale=1, answer_scale=1)
        return list(trace_arrivals(load, self.per_s, seconds, seed))


@for_each("per_s", [12.0, 18.0])
def test_with_an_h100s_step_times_more_code_is_met_than_first_come_first_served(
    per_s: float,
) -> None:
    """Below and above the capacity; a step with a prompt takes 29 ms more, and steps overlap."""
    scene = SimScene("code", f"{per_s}/s", H100, Completions(per_s))
    ours, fifo, edf = (
        run_cell(CellSpec(scene, RowsPolicy(name, None), 1, 12.0)).attainment
        for name in ("ours", "fifo", "edf")
    )
    assert ours >= max(fifo, edf) + 0.03
