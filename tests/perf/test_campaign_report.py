"""The campaign's table has a row for whatever was run."""

from rich.console import Console

from perf.sim.campaign import LABELS, OURS, Cell
from perf.sim.campaign_report import show


def cell(policy: str, goodput: float) -> Cell:
    return Cell(
        trace="code",
        arrivals="poisson",
        manner="tight",
        load=1.5,
        policy=policy,
        label=LABELS[policy],
        capacity=4.0,
        goodput=goodput,
        low=goodput,
        high=goodput,
        attainment=0.5,
        waste=0.25,
        refused=0.0,
        runs=(goodput, goodput),
    )


def shown(*cells: Cell) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        show(cells, console)
    return capture.get()


def test_ours_alone_has_its_row() -> None:
    text = shown(cell(OURS, 2.125))
    assert "Tidegate" in text and "2.12" in text and "25.0 %" in text


def test_ours_beside_a_rival_is_compared_with_it() -> None:
    rival = next(name for name in LABELS if not LABELS[name].startswith("Tidegate"))
    text = shown(cell(OURS, 3.0), cell(rival, 2.0))
    assert "1.500" in text and "0 of 1 cells" in text
