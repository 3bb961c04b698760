"""What a campaign came to: a table against the best rival, and a bundle."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from perf.report.bundle import BenchResult
from perf.report.recording import Recording
from perf.sim.campaign import KNOWN, OURS, Cell

_ALONE = "trace,arrivals,deadlines,load,policy,met/s,least,most,attainment,waste"
_WHAT = "trace,arrivals,deadlines,load,ours,best other,by,ours ÷ best,± noise,÷ known,waste"


def show(cells: Sequence[Cell], console: Console) -> None:
    """Ours beside the best of the others, cell by cell; what is below it comes first. Each cell by
    itself where nothing is to be compared.

    Noise is the standard error of the difference, paired by seed, over the best other.
    """
    groups: dict[tuple[str, str, str, float], dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        groups[cell.trace, cell.arrivals, cell.manner, cell.load][cell.policy] = cell
    rows = []
    for key, by_policy in groups.items():
        others = [c for name, c in by_policy.items() if name not in (OURS, KNOWN)]
        if OURS not in by_policy or not others:
            continue
        ours, best = by_policy[OURS], max(others, key=lambda c: c.goodput)
        ratio = ours.goodput / best.goodput if best.goodput else float("inf")
        noise = _noise(ours, best)
        known = by_policy.get(KNOWN)
        of_known = ours.goodput / known.goodput if known and known.goodput else float("nan")
        rows.append((ratio, noise, key, ours, best, of_known))
    if not rows:
        _show_alone(cells, console)
        return
    table = Table(title="met per second; below the best other first", title_justify="left")
    for column in _WHAT.split(","):
        table.add_column(column, justify="right" if column not in ("by",) else "left")
    for ratio, noise, (trace, arrivals, manner, load), ours, best, of_known in sorted(
        rows, key=lambda row: row[0]
    ):
        table.add_row(
            trace,
            arrivals,
            manner,
            f"{load:g}",
            f"{ours.goodput:.2f}",
            f"{best.goodput:.2f}",
            best.label,
            f"{ratio:.3f}",
            f"{noise:.3f}",
            f"{of_known:.2f}",
            f"{100 * ours.waste:.1f} %",
        )
    console.print(table)
    lost = sum(ratio + 2 * noise < 1 for ratio, noise, *_ in rows)
    console.print(f"{lost} of {len(rows)} cells are below the best other beyond twice the noise")


def _show_alone(cells: Sequence[Cell], console: Console) -> None:
    table = Table(title="met per second", title_justify="left")
    for column in _ALONE.split(","):
        table.add_column(column, justify="right" if column != "policy" else "left")
    for cell in cells:
        table.add_row(
            cell.trace,
            cell.arrivals,
            cell.manner,
            f"{cell.load:g}",
            cell.label,
            f"{cell.goodput:.2f}",
            f"{cell.low:.2f}",
            f"{cell.high:.2f}",
            f"{100 * cell.attainment:.1f} %",
            f"{100 * cell.waste:.1f} %",
        )
    console.print(table)


def _noise(ours: Cell, best: Cell) -> float:
    gaps = [a - b for a, b in zip(ours.runs, best.runs, strict=True)]
    if len(gaps) < 2 or not best.goodput:
        return float("nan")
    return float(stdev(gaps) / len(gaps) ** 0.5 / fmean(best.runs))


def save(cells: Sequence[Cell], seconds: float, recording: Recording) -> None:
    """Everything, with what it was measured on."""
    found = BenchResult(
        "sim-traces",
        "the orchestrator and its rivals on virtual time",
        seconds,
        [figure for cell in cells for figure in cell.figures()],
    )
    recording.save(replace(recording.bundle([found]), engine="sim", model="sim"))
