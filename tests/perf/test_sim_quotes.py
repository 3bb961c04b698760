"""What quotes said beside what became of it, as a diagram."""

from pathlib import Path

import pytest

from perf.report.bundle import Figure
from perf.sim import quotes
from perf.sim.plot import ChancePoint, draw_reliability

FIGURES = [
    Figure.of(key, "", unit, samples)
    for key, samples, unit in (
        ("1.5x.error", [0.03], ""),
        ("1.5x.quoted.70", [0.8, 0.7, 0.9], ""),
        ("1.5x.quoted.90", [0.95], ""),
        ("1.5x.reserved.99", [1.0], ""),
        ("1.5x.reserved.99.within_ms", [900.0], "ms"),
        ("1.5x.guessed.90", [0.6], ""),
    )
]


def test_the_diagram_has_the_share_met_of_each_chance_that_was_told() -> None:
    points = quotes.diagram_of({figure.key: figure for figure in FIGURES})
    assert points == {
        "quoted, not reserved": [
            ChancePoint(1.5, 0.7, 0.9, 0.8, 0.7, 0.9),
            ChancePoint(1.5, 0.9, 1.0, 0.95, 0.95, 0.95),
        ],
        "reserved": [ChancePoint(1.5, 0.99, 0.99, 1.0, 1.0, 1.0)],
        "guessed": [ChancePoint(1.5, 0.9, 0.9, 0.6, 0.6, 0.6)],
    }


@pytest.mark.slow
def test_what_was_told_can_be_drawn(tmp_path: Path) -> None:
    diagram = quotes.diagram_of({figure.key: figure for figure in FIGURES})
    draw_reliability(diagram, tmp_path / "quotes")
    assert (tmp_path / "quotes.png").stat().st_size > 1000
