"""One server at one rate: the outcome of its requests, as figures and as a row of a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from perf.load.open_loop import Result, StreamRequest
from perf.peers.stories import PATIENCE_S
from perf.report.bundle import Figure
from perf.report.stats import median, percentile
from perf.report.table import grouped, new_table

_WHOLE: Final = ("stop", "length")
"""Finish reasons of an answer that is complete."""

Outcome = tuple[StreamRequest, Result]


def is_met(ask: StreamRequest, result: Result) -> bool:
    """Whether the whole answer came by the client's own deadline."""
    in_time = 1000 * result.end_s <= ask.deadline_ms
    return result.complete and result.finish in _WHOLE and in_time


def is_refused(result: Result) -> bool:
    """Whether the server said at once that it would not try, or gave up before a first token."""
    return result.status not in (0, 200) and not result.first_s


@dataclass(frozen=True, slots=True)
class ServerTurn:
    """Requests that were due within ``window_s``; CPU seconds of the whole turn, of the server
    under load and of the idle one."""

    outcomes: list[Outcome]
    window_s: float
    cpu_s: float
    idle_cpu_s: float

    @property
    def met_per_s(self) -> float:
        return sum(is_met(*each) for each in self.outcomes) / self.window_s

    def attainment(self, patience_s: float | None = None) -> float:
        """The share that was met, of all or of the clients of one kind. 0 to 1."""
        met = [
            is_met(ask, result)
            for ask, result in self.outcomes
            if patience_s in (None, ask.deadline_ms / 1000)
        ]
        return sum(met) / max(1, len(met))

    @property
    def refused(self) -> float:
        """The share that was refused. 0 to 1."""
        return sum(is_refused(r) for _, r in self.outcomes) / max(1, len(self.outcomes))

    def line(self) -> str:
        """One line of progress for people."""
        ends = Counter("met" if is_met(*each) else each[1].code or "late" for each in self.outcomes)
        summary = ", ".join(f"{end} {count}" for end, count in sorted(ends.items()))
        return (
            f"{self.met_per_s:.1f} met/s of {len(self.outcomes)} ({summary}), "
            f"{self.cpu_s:.1f} s of CPU, idle {self.idle_cpu_s:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class PeerCell:
    """A server's turns at one offered rate per second."""

    server: str
    label: str
    rate: float
    turns: list[ServerTurn]

    @property
    def met_per_s(self) -> list[float]:
        """Requests met per second, turn by turn."""
        return [turn.met_per_s for turn in self.turns]

    def ttft_ms(self) -> list[float]:
        """Milliseconds to the first token, of all turns' requests that had one."""
        return [1000 * r.first_s for turn in self.turns for _, r in turn.outcomes if r.first_s]

    def late_send_ms(self) -> float:
        """Largest delay in ms with which the generator sent a request."""
        return max(1000 * r.late_s for turn in self.turns for _, r in turn.outcomes)

    def figures(self) -> list[Figure]:
        prefix, what = f"goodput.{self.server}.{self.rate:g}", f"{self.label}, {self.rate:g}/s"
        of, tail = Figure.of, Figure.tail_of
        shares = {
            f"attainment_{patience:g}s": [turn.attainment(patience) for turn in self.turns]
            for patience in PATIENCE_S
        }
        shares["refused"] = [turn.refused for turn in self.turns]
        ttft = self.ttft_ms()
        figures = [
            of(f"{prefix}.met_per_s", f"{what}: met", "/s", self.met_per_s, better="higher"),
            of(
                f"{prefix}.attainment",
                f"{what}: met, of those offered",
                "",
                [turn.attainment() for turn in self.turns],
                better="higher",
            ),
        ]
        for key, samples in shares.items():
            label = f"{what}: {key.replace('_', ' of ')}"
            figures.append(of(f"{prefix}.{key}", label, "", samples, better="neither"))
        if ttft:
            figures += [
                tail(f"{prefix}.ttft_p{q}_ms", f"{what}: first token, p{q}", "ms", ttft, q)
                for q in (50, 99)
            ]
        figures.append(
            of(
                f"{prefix}.idle_cpu_s",
                f"{what}: CPU of the other server meanwhile",
                "s",
                [turn.idle_cpu_s for turn in self.turns],
                better="neither",
            )
        )
        late = [self.late_send_ms()]
        label = f"{what}: generator late by at most"
        figures.append(of(f"{prefix}.late_send_ms", label, "ms", late, better="neither"))
        return figures


def show_cells(cells: Sequence[PeerCell], console: Console) -> None:
    """Print the table of all cells."""
    patience = (f"within {patience:g} s" for patience in PATIENCE_S)
    columns = ("met/s", "attained", *patience, "refused", "first token p50", "p99", "sent late")
    console.print(
        grouped(new_table("offered", "server", *columns, texts=2), (_row(cell) for cell in cells))
    )


def _row(cell: PeerCell) -> Sequence[str]:
    ttft = cell.ttft_ms()
    return (
        f"{cell.rate:g}/s",
        cell.label,
        f"{median(cell.met_per_s):.1f}",
        _percent([turn.attainment() for turn in cell.turns]),
        *(_percent([turn.attainment(p) for turn in cell.turns]) for p in PATIENCE_S),
        _percent([turn.refused for turn in cell.turns]),
        *(f"{percentile(ttft, q):.0f} ms" if ttft else "-" for q in (50, 99)),
        f"{cell.late_send_ms():.0f} ms",
    )


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * median(shares):.0f} %"
