"""The campaign's figures are drawn (PF-2)."""

from itertools import product
from pathlib import Path

import pytest

from perf.load.trace import Manner
from perf.sim.campaign import LABELS, CellRun, RowsPolicy, SimCell
from perf.sim.campaign_report import draw
from perf.sim.scenes import SLOW, SimScene, Traced


def cell(scene: SimScene, policy: RowsPolicy, met: float) -> SimCell:
    run = CellRun(20 * met, met, waste=0.25, tokens_per_s=900.0, refused=0.0, focus=0.5)
    return SimCell(scene, policy, (run,) * 3)


@pytest.mark.slow
def test_pf2_the_plot_has_a_panel_for_each_trace_and_manner(tmp_path: Path) -> None:
    cells = []
    for trace, manner, load in product(("chat", "code"), Manner, (1.0, 2.0)):
        source = Traced(tmp_path, "trace", manner, load, 30.0, SLOW)
        scene = SimScene(f"{trace}.trace.{manner}", f"{load:g}x", SLOW, source)
        cells += [cell(scene, RowsPolicy(policy), 0.5 / load) for policy in LABELS]
    draw(cells, tmp_path / "deep" / "plot")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")
