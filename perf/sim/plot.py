"""Plot of a campaign, as PNG: goodput by load, for every trace and manner of deadlines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """One policy at one load, over seeds: the median of ``goodput`` with its spread, in met
    requests per second; so is ``capacity``, of the trace and not of the policy."""

    trace: str
    arrivals: str
    manner: str
    load: float
    policy: str
    label: str
    goodput: float
    low: float
    high: float
    capacity: float


class _Style(NamedTuple):
    colour: str
    marker: str
    width: float = 1.5
    line: str | tuple[int, tuple[int, int]] = "-"


OURS, CEILING = "ours", "known"
# Okabe and Ito's colours, which everybody can tell apart; markers differ too.
_STYLES = {
    OURS: _Style("#0072B2", "o", 3.0),
    CEILING: _Style("#0072B2", "", 1.6, (0, (4, 2))),
}
_RIVALS = (
    _Style("#E69F00", "s"),
    _Style("#009E73", "D"),
    _Style("#D55E00", "^"),
    _Style("#CC79A7", "v"),
    _Style("#56B4E9", "P"),
    _Style("#777777", "X"),
)
_INK = "#333333"
_TITLES = {
    "proportional": "deadline by the answer's length",
    "constant": "deadline by the application",
    "parts": "first token, then every gap",
}
"""Titles by manner."""


def draw(cells: Sequence[PlotPoint], stem: Path) -> None:
    """Write ``stem``.png.

    A row of panels for each trace and its arrivals, a column for each manner. Goodput is in units
    of the capacity, so that panels share one scale.
    """
    rows = list(dict.fromkeys((cell.trace, cell.arrivals) for cell in cells))
    manners = list(dict.fromkeys(cell.manner for cell in cells))
    styles = _styles(list(dict.fromkeys(cell.policy for cell in cells)))
    size = (max(6.0, 3.6 * len(manners)), 1.4 + 2.8 * len(rows))
    figure = _new_figure(*size)
    panels = figure.subplots(len(rows), len(manners), squeeze=False, sharex=True, sharey=True)
    for (trace, arrivals), row in zip(rows, panels, strict=True):
        for manner, axes in zip(manners, row, strict=True):
            own = [
                cell
                for cell in cells
                if (cell.trace, cell.arrivals, cell.manner) == (trace, arrivals, manner)
            ]
            _panel(axes, own, styles)
        row[0].set_ylabel(f"{trace}, {arrivals} arrivals\nmet / capacity")
    for manner, axes in zip(manners, panels[0], strict=True):
        axes.set_title(_TITLES.get(manner, manner), loc="left", size=11, weight="bold")
    for axes in panels[-1]:
        axes.set_xlabel("offered load, × capacity")
    panels[0][0].set_ylim(0, 1.08 * max(1.0, *(cell.high / cell.capacity for cell in cells)))
    loads = {cell.load for cell in cells}
    panels[0][0].set_xlim(min(loads) - 0.1, max(loads) + 0.1)
    drawn = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    bound = next(iter(drawn))
    drawn[bound] = drawn.pop(bound)  # last
    figure.legend(
        list(drawn.values()),
        list(drawn),
        loc="outside upper center",
        ncols=max(2, min(3, round(size[0] / 3))),
        frameon=False,
    )
    _save(figure, stem)


def _new_figure(width: float, height: float) -> "Figure":
    # Here, so that whoever draws nothing needs no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 11, "axes.edgecolor": _INK, "text.color": _INK})
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": ""})


def _styles(policies: Sequence[str]) -> dict[str, _Style]:
    """Styles by policy: ours stand out; rivals have theirs in the order in which they come."""
    rivals = [policy for policy in policies if policy not in _STYLES]
    if len(rivals) > len(_RIVALS):
        raise ValueError(f"{len(rivals)} rivals in one plot; there are styles for {len(_RIVALS)}")
    return _STYLES | dict(zip(rivals, _RIVALS, strict=False))


def _panel(axes: "Axes", cells: Sequence[PlotPoint], styles: dict[str, _Style]) -> None:
    loads = sorted({cell.load for cell in cells})
    if loads:
        # What could be met if every request were met until the engines are full.
        corners = sorted({0.0, min(1.0, loads[-1]), loads[-1]})
        offered = [min(load, 1.0) for load in corners]
        label = "all offered, up to the capacity"
        axes.plot(corners, offered, color="#888888", lw=1.2, ls=":", zorder=1, label=label)
    for policy in dict.fromkeys(cell.policy for cell in cells):
        own = sorted((c for c in cells if c.policy == policy), key=lambda c: c.load)
        style = styles[policy]
        at = [cell.load for cell in own]
        axes.fill_between(
            at,
            [cell.low / cell.capacity for cell in own],
            [cell.high / cell.capacity for cell in own],
            color=style.colour,
            alpha=0.15,
            lw=0,
        )
        axes.plot(
            at,
            [cell.goodput / cell.capacity for cell in own],
            color=style.colour,
            marker=style.marker,
            ms=6.5 if policy == OURS else 4.5,
            lw=style.width,
            ls=style.line,
            label=own[0].label,
            zorder={OURS: 4, CEILING: 3}.get(policy, 2),
        )
    axes.tick_params(labelsize=10)
    axes.grid(axis="y", color="#dddddd", lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
