"""The plot of ``perf.goodput``: goodput of each policy over the load."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perf.goodput.cell import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class _Style(NamedTuple):
    colour: str
    marker: str
    width: float
    line: str = "-"


_STYLES = {
    "ours": _Style("#0b6e99", "o", 2.8),
    "known": _Style("#0b6e99", "", 1.6, "--"),
    "no-prediction": _Style("#7fb069", "D", 1.6),
    "fifo-hang-up": _Style("#e6953b", "s", 1.6),
    "fifo-timeout": _Style("#8d6cab", "v", 1.6),
    "fifo": _Style("#b5404a", "^", 1.6),
}
"""Styles by policy, colour-blind safe: hue, lightness and marker all differ."""
_INK = "#333333"


def draw(cells: Sequence[Cell], capacities: Mapping[str, float], stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths. ``capacities`` are by trace."""
    # Here, so that a run without a plot needs no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same run draws the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tidegate"})
    matplotlib.rcParams.update({"font.size": 10, "axes.edgecolor": _INK, "text.color": _INK})
    from matplotlib.figure import Figure

    scenes = list(dict.fromkeys(cell.scene for cell in cells))
    figure = Figure(figsize=(max(7.5, 4.2 * len(scenes)), 7.2), layout="constrained")
    panels = figure.subplots(3, len(scenes), squeeze=False, height_ratios=(2.2, 1, 1))
    for column, scene in enumerate(scenes):
        own = [cell for cell in cells if cell.scene == scene]
        goodput, ttft, waste = panels[:, column]
        _panel(goodput, own, lambda c: c.goodput)
        goodput.set_title(str(scene), loc="left", size=11, weight="bold")
        _capacity(goodput, own, capacities[scene.trace])
        _panel(ttft, own, lambda c: c.ttft(99))
        ttft.set_yscale("log")
        ttft.set_yticks([100, 300, 1000, 3000, 10_000], ["100", "300", "1 000", "3 000", "10 000"])
        ttft.minorticks_off()
        ttft.set_ylim(*_decades([c.ttft(99) for c in own if c.ttft_ms]))
        _panel(waste, own, lambda c: 100 * c.waste)
        waste.set_ylim(-4, 103)
        waste.set_xlabel("offered load, × capacity")
    names = ("met per second", "first token, p99, ms", "wasted tokens, %")
    for axes, name in zip(panels[:, 0], names, strict=True):
        axes.set_ylabel(name)
    handles, labels = panels[0][0].get_legend_handles_labels()
    columns = min(len(labels), 2 * len(scenes))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths[0], dpi=140, metadata={"Software": ""})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _capacity(axes: "Axes", cells: Sequence[Cell], capacity: float) -> None:
    """Draw the goodput there would be if every request were met until the engines are full."""
    loads = sorted({cell.load for cell in cells})
    offered = [min(load, 1.0) * capacity for load in loads]
    axes.plot(loads, offered, color="#999999", lw=1, ls=":", zorder=1)
    axes.annotate(
        "capacity",
        (loads[-1], capacity),
        (0, 4),
        textcoords="offset points",
        ha="right",
        size=9,
        color="#777777",
    )
    axes.set_ylim(0, 1.15 * max([capacity, *(cell.goodput for cell in cells)]))


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis with some room on both sides."""
    return min([80.0, *(0.8 * value for value in values)]), max([1000.0, *values]) * 1.3


def _panel(axes: "Axes", cells: Sequence[Cell], value: Callable[[Cell], float]) -> None:
    for policy in dict.fromkeys(cell.policy for cell in cells):
        own = [cell for cell in cells if cell.policy == policy]
        style = _STYLES[policy]
        axes.plot(
            [cell.load for cell in own],
            [value(cell) for cell in own],
            color=style.colour,
            marker=style.marker,
            ms=6,
            lw=style.width,
            ls=style.line,
            label=own[0].label,
            zorder=3 if policy == "ours" else 2,
        )
    axes.set_xticks(sorted({cell.load for cell in cells}))
    axes.grid(axis="y", color="#dddddd", lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
