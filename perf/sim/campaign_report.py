"""Report of a campaign: a table with a row for each cell, and a bundle."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from perf.report.bundle import BenchResult
from perf.report.recording import Recording
from perf.sim.campaign import LABELS, OURS, SimCell
from perf.sim.rivals.policies import RIVALS
from perf.sim.scenes import SimScene, Traced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = "cell,met %,lowest … highest,met/s,waste %,tokens/s,÷ FIFO,÷ own best,÷ best rival,focus"


def show(cells: Sequence[SimCell], console: Console) -> None:
    """Print ours and the others, cell by cell, medians over seeds; where ours loses most comes
    first.

    ``÷ own best`` compares with ours at the best fixed number of rows of that cell, ``÷ best
    rival`` with the best rival at its best number of rows, ``÷ FIFO`` with first come, first served
    and every slot. In brackets is what the best fixed number of rows of ours meets of the cell's
    ``focus``.
    """
    scenes: dict[SimScene, list[SimCell]] = defaultdict(list)
    for cell in cells:
        scenes[cell.scene].append(cell)
    rows = []
    for own in scenes.values():
        ours = [cell for cell in own if cell.policy.key == OURS]
        if ours and len(own) > 1:
            rows.append(_compared(ours[0], own))
    rows.sort(key=lambda row: row[0])
    table = Table(title="ours; where it loses most first", title_justify="left")
    for column in _COLUMNS.split(","):
        table.add_column(column, justify="left" if column == "cell" else "right")
    for _, row in rows:
        table.add_row(*row)
    console.print(table)
    lost = sum(least < 1 for least, _ in rows)
    console.print(f"{lost} of {len(rows)} cells are below a rival or ours with fixed rows")


def _compared(ours: SimCell, cells: Sequence[SimCell]) -> tuple[float, list[str]]:
    """Row of a cell's table, with the least of its ratios before it."""
    fixed = [c for c in cells if c.policy.name == OURS and c is not ours]
    rivals = [c for c in cells if c.policy.name in RIVALS]
    fifo = [c for c in rivals if c.policy.key == "fifo"]
    compared = [_ratio(ours, beside) for beside in (fifo, fixed, rivals)]
    shown = [f"{ratio:.2f} {best.policy.key}" if best else "" for ratio, best in compared]
    ratios = [ratio for ratio, _ in compared]
    focus = _focus(ours)
    if focus and fixed:
        best = max(fixed, key=_of_focus)
        ratios.append(_of_focus(ours) / (_of_focus(best) or math.nan))
        focus += f" ({100 * _of_focus(best):.0f} % {best.policy.key})"
    least = min((ratio for ratio in ratios if not math.isnan(ratio)), default=math.inf)
    return least, [str(ours.scene), *_figures(ours), *shown, focus]


def _ratio(ours: SimCell, others: Sequence[SimCell]) -> tuple[float, SimCell | None]:
    """Goodput of ``ours`` over that of the best of the others, and that one; NaN and None of
    none."""
    if not others:
        return math.nan, None
    best = max(others, key=lambda cell: cell.median("goodput"))
    if not best.median("goodput"):
        return math.inf, best
    return ours.median("goodput") / best.median("goodput"), best


def _figures(cell: SimCell) -> list[str]:
    met = cell.values("attainment")
    return [
        f"{100 * cell.median('attainment'):.1f}",
        f"{100 * min(met):.1f} … {100 * max(met):.1f}",
        f"{cell.median('goodput'):.2f}",
        f"{100 * cell.median('waste'):.1f}",
        f"{cell.median('tokens_per_s'):.0f}",
    ]


def _of_focus(cell: SimCell) -> float:
    return cell.median("focus")


def _focus(cell: SimCell) -> str:
    return f"{cell.scene.focus} {100 * _of_focus(cell):.0f} %" if cell.scene.focus else ""


def save(cells: Sequence[SimCell], seconds: float, recording: Recording) -> None:
    """Save all figures with what they were measured on."""
    found = BenchResult(
        "sim-traces",
        "the orchestrator and its rivals on virtual time",
        seconds,
        [figure for cell in cells for figure in cell.figures()],
    )
    recording.save(replace(recording.bundle([found]), engine="sim", model="sim"))


_MARKERS: Final = "osD^vPX*"
_TITLES: Final = {
    "proportional": "deadline by the answer's length",
    "constant": "deadline by the application",
    "parts": "first token, then every gap",
}
"""Titles by manner."""


def draw(cells: Sequence[SimCell], stem: Path) -> None:
    """Write ``stem``.png of the cells on traces whose policies have no fixed number of rows.

    A row of panels for each trace and its arrivals, a column for each manner. Goodput is in units
    of the capacity, so that panels share one scale.
    """
    # Here, so that a run that draws nothing needs no matplotlib.
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[tuple[SimCell, Traced]]] = defaultdict(list)
    for cell in cells:
        source = cell.scene.source
        if isinstance(source, Traced) and cell.policy.rows is None:
            trace = cell.scene.name.split(".")[0]
            row = f"{trace}, {source.arrivals_by} arrivals"
            panels[row, source.manner].append((cell, source))
    rows, manners = (list(dict.fromkeys(each)) for each in zip(*panels, strict=True))
    size = (max(6.0, 3.6 * len(manners)), 1.4 + 2.8 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), len(manners), squeeze=False, sharex=True, sharey=True)
    for (row, manner), own in panels.items():
        _panel(grid[rows.index(row)][manners.index(manner)], own)
    for axes, manner in zip(grid[0], manners, strict=True):
        axes.set_title(_TITLES[manner], loc="left", size=11, weight="bold")
    for axes, row in zip(grid[:, 0], rows, strict=True):
        axes.set_ylabel(f"{row}\nmet / capacity")
    for axes in grid[-1]:
        axes.set_xlabel("offered load, × capacity")
    grid[0][0].set_ylim(bottom=0)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": ""})


def _panel(axes: "Axes", cells: Sequence[tuple[SimCell, Traced]]) -> None:
    for number, policy in enumerate(LABELS):
        own = sorted((each for each in cells if each[0].policy.name == policy), key=_load)
        if not own:
            continue
        loads = [_load(each) for each in own]
        goodput = [[value / s.capacity for value in cell.values("goodput")] for cell, s in own]
        color, width, marker = f"C{number}", 3.0 if policy == OURS else 1.5, _MARKERS[number]
        middle = [cell.median("goodput") / source.capacity for cell, source in own]
        axes.plot(loads, middle, marker=marker, label=LABELS[policy], color=color, lw=width)
        low, high = [min(each) for each in goodput], [max(each) for each in goodput]
        axes.fill_between(loads, low, high, color=color, alpha=0.15, lw=0)
    axes.grid(axis="y", color="#dddddd", lw=0.7)


def _load(each: tuple[SimCell, Traced]) -> float:
    return each[1].load
