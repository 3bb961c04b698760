"""Figures of a simulation."""

from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.tasks.job import Priority
from perf.report.stats import percentile
from perf.sim.simulate import SimRun
from protocol import Outcome


class Calibrated(NamedTuple):
    """Requests that were given about the same chance. Shares are 0 to 1."""

    requests: int
    chance: float
    met: float


def calibration(run: SimRun) -> dict[tuple[Priority, int], Calibrated]:
    """Chances given and requests met, by class and least chance in percent."""
    return {
        key: Calibrated(tally.given, tally.chances / tally.given, tally.met / tally.given)
        for key, tally in run.orchestrator.stages.prediction.calibration.tallies.items()
        if tally.given
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy at one load. Shares are 0 to 1."""

    offered: int
    goodput: float
    attainment: float
    waste: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    refused: float
    false_refusals: float
    samples: int

    @classmethod
    def of(cls, run: SimRun, warm_s: float) -> "Summary":
        """Summary of the arrivals after ``warm_s``; tokens and refusals over all of them."""
        results = [result for result in run.results if result.arrival.at_s >= warm_s]
        met = sum(result.met for result in results)
        late = sum(worker.tokens_late for worker in run.workers)
        tokens = sum(result.tokens for result in results) + late
        wasted = sum(
            result.tokens
            for result in results
            if not result.met and result.outcome is not Outcome.PARTIAL
        )
        ttft = [1000 * (f.first_s - f.arrival.at_s) for f in results if f.first_s]
        refusals = run.orchestrator.refusals
        return cls(
            offered=len(results),
            goodput=met / (run.seconds - warm_s),
            attainment=met / len(results) if results else 1.0,
            waste=(wasted + late) / tokens if tokens else 0.0,
            ttft_p50_ms=percentile(ttft, 50) if ttft else float("nan"),
            ttft_p99_ms=percentile(ttft, 99) if ttft else float("nan"),
            refused=sum(f.outcome is Outcome.REFUSED for f in results) / max(1, len(results)),
            false_refusals=refusals.false_rate,
            samples=refusals.sampled_met + refusals.sampled_missed,
        )
