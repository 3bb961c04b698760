"""The regression gate: checks counted promises, and compares ratios of a quick run with recorded
ones (PF-1).

    python -m perf.gate --recorded perf/results/quick.json

It runs only the benchmarks with a gate, in quick mode, and compares only figures with a tolerance.
These are ratios of two figures of the same run, so that the machine's speed cancels out. The
tolerance is a factor of 1.5 to 2.5: wide enough for a busy shared machine, narrow enough to detect
a cost that doubles or triples. A recorded gate that is missing from the run also fails.

Benchmarks that are promises (``Bench.is_promise``) run on machines of every tier, and fail without
a comparison.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from perf.report.bundle import Bundle, Figure, Tier, read
from perf.report.command import new_console, new_parser
from perf.report.machine import tier
from perf.report.recording import Recording
from perf.report.table import new_table, show
from perf.service import BENCHES, run_all
from perf.stack.context import Bench


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Verdict on one gate: ``worse_by`` is a factor (1: as recorded; None: not measured)."""

    recorded: Figure
    current: Figure | None
    worse_by: float | None

    @property
    def tolerance(self) -> float:
        """Factor that the current code allows; it may have changed since the recording."""
        now = None if self.current is None else self.current.tolerance
        assert self.recorded.tolerance is not None
        return self.recorded.tolerance if now is None else now

    @property
    def passed(self) -> bool:
        return self.worse_by is not None and self.worse_by <= self.tolerance


def compare(recorded: Bundle, current: Bundle) -> list[GateVerdict]:
    """Verdicts on all recorded figures with a tolerance.

    Raises ``ValueError`` if there is none, because such a gate would check nothing.
    """
    measured = current.figures()
    verdicts = []
    for key, figure in recorded.figures().items():
        if figure.tolerance is not None:
            now = measured.get(key)
            verdicts.append(GateVerdict(figure, now, _worse_by(figure, now) if now else None))
    if not verdicts:
        raise ValueError("the recorded bundle has no figure with a tolerance")
    return verdicts


def of_today(recorded: Bundle) -> Bundle:
    """A recorded bundle without benchmarks that no longer exist."""
    names = {bench.name for bench in BENCHES}
    return replace(recorded, results=[each for each in recorded.results if each.name in names])


def why_not_compared(there: Tier | None, here: Tier | None) -> str:
    """Reason why figures from machines of two tiers are not compared (PF-8). Empty if the tier is
    the same, or if a bundle is older than tiers."""
    if there is None or here is None or there == here:
        return ""
    return f"not compared: recorded on a machine of tier {there}, measured on one of tier {here}"


def _worse_by(recorded: Figure, current: Figure) -> float:
    if recorded.better == "higher":
        return recorded.median / current.median if current.median > 0 else float("inf")
    return current.median / recorded.median if recorded.median > 0 else float("inf")


def _report(verdicts: list[GateVerdict], console: Console) -> None:
    table = new_table("gate", "recorded", "now", "worse by", "allowed", "")
    for verdict in verdicts:
        figure, now = verdict.recorded, verdict.current
        table.add_row(
            figure.label,
            f"{figure.median:.3g}",
            f"{now.median:.3g}" if now else "not measured",
            f"×{verdict.worse_by:.2f}" if verdict.worse_by is not None else "-",
            f"×{verdict.tolerance:.2f}",
            "[green]ok[/green]" if verdict.passed else "[red]regressed[/red]",
        )
    console.print(table)


def _run(benches: list[Bench], console: Console) -> Bundle:
    recording = Recording.begin(["perf.gate"])
    bundle = asyncio.run(run_all(benches, recording, quick=True, device="cpu", console=console))
    show(bundle, console)
    return bundle


def main() -> int:
    parser = new_parser(__doc__, saves=False)
    parser.add_argument("--recorded", type=Path, required=True, metavar="PATH")
    args = parser.parse_args()
    console = new_console()
    recorded = of_today(read(args.recorded))
    why = why_not_compared(recorded.machine.tier, tier())
    gated = {r.name for r in recorded.results if any(f.tolerance for f in r.figures)}
    promises = {bench.name for bench in BENCHES if bench.is_promise}
    names = promises if why else promises | gated
    current = _run([bench for bench in BENCHES if bench.name in names], console)
    is_broken = any(r.failed for r in current.results if r.name in promises)
    if why:
        console.print(why)
        return int(is_broken)
    verdicts = compare(recorded, current)
    _report(verdicts, console)
    return int(is_broken or not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
