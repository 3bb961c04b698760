"""The campaign's table has a row for each cell, and says where ours loses."""

from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from perf.load.trace import Manner
from perf.sim.campaign import LABELS, OURS, CellRun, RowsPolicy, SimCell
from perf.sim.campaign_report import draw, show
from perf.sim.scenes import SLOW, SimScene, Traced, drawn_scenes

FLOOD, LONG = (
    next(scene for scene in drawn_scenes() if scene.name == name)
    for name in ("flood", "long-prompts")
)


def cell(scene: SimScene, policy: RowsPolicy, met: float, focus: float = 0.5) -> SimCell:
    run = CellRun(20 * met, met, waste=0.25, tokens_per_s=900.0, refused=0.0, focus=focus)
    return SimCell(scene, policy, (run,) * 3)


def shown(*cells: SimCell) -> str:
    console = Console(width=220)
    with console.capture() as capture:
        show(cells, console)
    return capture.get()


def test_ours_is_compared_with_the_best_of_each_kind_and_where_it_loses_comes_first() -> None:
    compared = shown(
        cell(LONG, RowsPolicy(OURS), 0.6),
        cell(LONG, RowsPolicy("fifo"), 0.5),
        cell(FLOOD, RowsPolicy(OURS), 0.6),
        cell(FLOOD, RowsPolicy(OURS, 16), 0.8, focus=0.9),
        cell(FLOOD, RowsPolicy("fifo"), 0.3),
        cell(FLOOD, RowsPolicy("fifo", 8), 0.4),
        cell(FLOOD, RowsPolicy("edf", 16), 0.5),
    )
    assert compared.index("flood") < compared.index("long-prompts")
    for words in ("2.00 fifo ", "0.75 ours@16", "1.20 edf@16", "small 50 % (90 % ours@16)"):
        assert words in compared
    assert "1.20 fifo" in compared and "1 of 2 cells" in compared


@pytest.mark.slow
def test_pf2_the_plot_has_a_panel_for_each_trace_and_manner(tmp_path: Path) -> None:
    cells = []
    for trace, manner, load in product(("chat", "code"), Manner, (1.0, 2.0)):
        source = Traced(tmp_path, "trace", manner, load, 30.0, SLOW.speed)
        scene = SimScene(f"{trace}.trace.{manner}", f"{load:g}x", SLOW, source)
        cells += [cell(scene, RowsPolicy(policy), 0.5 / load) for policy in LABELS]
    draw(cells, tmp_path / "deep" / "plot")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")
