"""Plot of a campaign, as PNG: goodput by load, for every trace and manner of deadlines (PF-2)."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perf.sim.campaign import LABELS, OURS, SimCell
from perf.sim.scenes import Traced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    # Here, so that whoever draws nothing needs no matplotlib.
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
