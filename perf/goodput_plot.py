"""The plot of ``perf.goodput``: what each policy makes of more and more load."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perf.goodput_cell import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {
    "ours": ("#0b6e99", "o", 2.6),
    "no-prediction": ("#7fb069", "D", 1.6),
    "fifo-timeout": ("#e6953b", "s", 1.6),
    "fifo": ("#b5404a", "^", 1.6),
}
"""Colour-blind safe: hue, lightness and marker all differ."""
_INK = "#333333"


def draw(cells: Sequence[Cell], capacity: float, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; their paths."""
    # Here, so that a run without a plot needs no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same run draws the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tidegate"})
    matplotlib.rcParams.update({"font.size": 10, "axes.edgecolor": _INK, "text.color": _INK})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    (goodput, attained), (ttft, waste) = figure.subplots(2, 2)
    _panel(goodput, cells, lambda c: c.goodput, "Goodput: requests met per second")
    loads = sorted({cell.load for cell in cells})
    offered = [min(load, 1.0) * capacity for load in loads]
    goodput.plot(loads, offered, color="#999999", lw=1, ls=":", zorder=1)
    goodput.annotate(
        "capacity",
        (loads[-1], capacity),
        (0, -12),
        textcoords="offset points",
        ha="right",
        size=9,
        color="#777777",
    )
    goodput.set_ylim(0, 1.15 * max([capacity, *(cell.goodput for cell in cells)]))
    _panel(attained, cells, lambda c: 100 * c.attainment, "Attainment: met, % of offered")
    attained.set_ylim(0, 103)
    _panel(ttft, cells, lambda c: c.ttft(99), "First token, p99, ms (of those that had one)")
    ttft.set_yscale("log")
    ttft.set_yticks([100, 300, 1000, 3000, 10_000], ["100", "300", "1 000", "3 000", "10 000"])
    ttft.minorticks_off()
    ttft.set_ylim(*_decades([c.ttft(99) for c in cells if c.ttft_ms]))
    _panel(waste, cells, lambda c: 100 * c.waste, "Waste: tokens for requests not met, %")
    waste.set_ylim(-2, 103)
    for axes in (ttft, waste):
        axes.set_xlabel("offered load, × capacity")
    handles, labels = goodput.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths[0], dpi=140, metadata={"Software": ""})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis with some room on both sides."""
    return min([80.0, *(0.8 * value for value in values)]), max([1000.0, *values]) * 1.3


def _panel(axes: "Axes", cells: Sequence[Cell], value: Callable[[Cell], float], title: str) -> None:
    for policy in dict.fromkeys(cell.policy for cell in cells):
        own = [cell for cell in cells if cell.policy == policy]
        colour, marker, width = _STYLES[policy]
        axes.plot(
            [cell.load for cell in own],
            [value(cell) for cell in own],
            color=colour,
            marker=marker,
            ms=6,
            lw=width,
            label=own[0].label,
            zorder=3 if policy == "ours" else 2,
        )
    axes.set_title(title, loc="left", size=10, weight="bold")
    axes.set_xticks(sorted({cell.load for cell in cells}))
    axes.grid(axis="y", color="#dddddd", lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
