"""One policy at one load: the outcome of its requests, as figures and as a row of a table."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from perf.goodput.policies import Policy
from perf.load.open_loop import Result, StreamRequest
from perf.load.trace import Manner
from perf.report.bundle import Figure
from perf.report.stats import bootstrap, percentile
from perf.report.table import grouped, new_table
from perf.stack.scrape import Scrape

_SEED = 11
_SAMPLES = "tidegate_infeasible_samples_total"


class Scene(NamedTuple):
    """A trace and a manner of deadlines, on which policies are compared at one load after the
    other."""

    trace: str
    manner: Manner

    def __str__(self) -> str:
        return f"{self.trace}, deadlines: {self.manner}"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one policy at one load. Counts are requests due within the window; shares 0 to 1.

    ``sampled`` are would-be refusals that the service let in to learn from, ``sampled_met`` those
    of them that were met after all: false refusals, had they been refused.
    """

    scene: Scene
    policy: str
    label: str
    load: float
    offered: int
    met: int
    refused: int
    goodput: float
    goodput_low: float
    goodput_high: float
    tokens: int
    wasted: int
    ttft_ms: list[float]
    sampled: int
    sampled_met: int
    late_send_ms: float
    ends: dict[str, int]
    """Requests by how they ended: ``met``, ``late``, the part that was missed, ``unanswered`` or
    the error's code."""

    @property
    def attainment(self) -> float:
        return self.met / self.offered if self.offered else 0.0

    @property
    def waste(self) -> float:
        return self.wasted / self.tokens if self.tokens else 0.0

    def ttft(self, q: float) -> float:
        """The ``q``-th percentile in ms, of requests that had a first token; NaN without any."""
        return percentile(self.ttft_ms, q) if self.ttft_ms else float("nan")

    def line(self) -> str:
        """One line of progress for people."""
        ends = ", ".join(f"{code} {count}" for code, count in sorted(self.ends.items()))
        return (
            f"{self.load:g} × {self.label}: {self.goodput:.1f} met/s, "
            f"{100 * self.attainment:.0f} % of {self.offered} ({ends})"
        )

    def figures(self) -> list[Figure]:
        scene = self.scene
        prefix = f"{scene.trace}.{scene.manner}.{self.load:g}x.{self.policy}"
        what = f"{scene}, {self.load:g} ×, {self.label}"

        def plain(key: str, label: str, unit: str, value: float, n: int) -> Figure:
            return Figure(
                key=f"{prefix}.{key}",
                label=f"{what}: {label}",
                unit=unit,
                median=value,
                low=value,
                high=value,
                spread="min–max",
                n=n,
                better="neither",
            )

        figures = [
            Figure(
                key=f"{prefix}.goodput_per_s",
                label=f"{what}: goodput",
                unit="requests/s",
                median=self.goodput,
                low=self.goodput_low,
                high=self.goodput_high,
                spread="bootstrap 95 %",
                n=self.offered,
                better="higher",
            ),
            plain("attainment", "attainment", "", self.attainment, self.offered),
            plain("refused", "refused", "", self.refused / max(1, self.offered), self.offered),
            plain("waste", "waste", "", self.waste, self.tokens),
            plain(
                "late_send_ms", "generator late by at most", "ms", self.late_send_ms, self.offered
            ),
        ]
        for q in (50, 99):
            if self.ttft_ms:
                n = len(self.ttft_ms)
                figures.append(plain(f"ttft_p{q}_ms", f"first token, p{q}", "ms", self.ttft(q), n))
        if self.sampled:
            share = self.sampled_met / self.sampled
            figures.append(
                plain("false_refusals", "false among refusals sampled", "", share, self.sampled)
            )
        return figures


def is_met(ask: StreamRequest, result: Result) -> bool:
    """Whether the whole answer came by the request's own deadline, and every part by its own."""
    in_time = 1000 * result.end_s <= ask.deadline_ms
    return result.complete and in_time and not result.missed


def _end_of(ask: StreamRequest, result: Result) -> str:
    if result.complete:
        return "met" if is_met(ask, result) else result.missed or "late"
    if result.code and result.tokens:
        return f"{result.code} after tokens"
    return result.code or "unanswered"


def cell_of(
    scene: Scene,
    policy: Policy,
    load: float,
    window_s: float,
    measured: Sequence[tuple[StreamRequest, Result]],
    counted: Scrape,
) -> Cell:
    """Cell of the requests of one window; ``counted`` is what the service counted meanwhile."""
    met = [is_met(ask, result) for ask, result in measured]
    per_s = len(measured) / window_s
    low, high = bootstrap(
        [float(each) for each in met], lambda drawn: sum(drawn) / len(drawn), random.Random(_SEED)
    )
    return Cell(
        scene=scene,
        policy=policy.name,
        label=policy.label,
        load=load,
        offered=len(measured),
        met=sum(met),
        refused=sum(result.status not in (0, 200) and not result.tokens for _, result in measured),
        goodput=sum(met) / window_s,
        goodput_low=per_s * low,
        goodput_high=per_s * high,
        tokens=sum(result.tokens for _, result in measured),
        wasted=sum(
            result.tokens for (_, result), each in zip(measured, met, strict=True) if not each
        ),
        ttft_ms=[1000 * result.first_s for _, result in measured if result.first_s],
        sampled=round(counted.total(_SAMPLES)),
        sampled_met=round(counted.total(_SAMPLES, result="met")),
        late_send_ms=1000 * max(result.late_s for _, result in measured),
        ends=dict(Counter(_end_of(*each) for each in measured)),
    )


def show_cells(cells: Sequence[Cell], console: Console) -> None:
    """Print the tables, one per scene."""
    for scene in dict.fromkeys(cell.scene for cell in cells):
        console.print(_table(scene, [cell for cell in cells if cell.scene == scene]))


def _table(scene: Scene, cells: Sequence[Cell]) -> Table:
    columns = "load,policy,goodput/s,attained,refused,waste,first token p50,p99,false refusals"
    return grouped(
        new_table(*columns.split(","), "sent late", texts=2, title=str(scene)),
        (
            (
                f"{cell.load:g} ×",
                cell.label,
                f"{cell.goodput:.1f}",
                f"{100 * cell.attainment:.1f} %",
                f"{100 * cell.refused / max(1, cell.offered):.1f} %",
                f"{100 * cell.waste:.2f} %",
                f"{cell.ttft(50):.0f} ms",
                f"{cell.ttft(99):.0f} ms",
                f"{cell.sampled_met} of {cell.sampled}" if cell.sampled else "-",
                f"{cell.late_send_ms:.0f} ms",
            )
            for cell in cells
        ),
    )
