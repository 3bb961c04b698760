"""The load that tests of the simulator share, and what became of it."""

from dataclasses import dataclass

from perf.goodput.policies import Policy
from perf.report.stats import percentile
from perf.sim.arrivals import Scenario
from perf.sim.scenes import SPEED, UNBOUNDED
from perf.sim.simulate import Fleet, SimRun, simulate
from protocol import Outcome

SCENARIO = Scenario(SPEED)
SEED = 7
CAPACITY = 28.66323349824144
"""Requests per second of ``SCENARIO`` that ``FLEET`` can do; ``test_sim`` holds it to the fleet."""


def run_policy(
    policy: Policy, scenario: Scenario, fleet: Fleet, per_s: float, seconds: float, seed: int
) -> SimRun:
    """Simulate one policy under one load."""
    return simulate(
        scenario.arrivals(per_s, seconds, seed),
        fleet,
        UNBOUNDED | dict(policy.settings),
        seed=seed,
        states_deadline=policy.states_deadline,
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy at one load. Shares are 0 to 1."""

    goodput: float
    attainment: float
    waste: float
    ttft_p50_ms: float

    @classmethod
    def of(cls, run: SimRun, warm_s: float) -> "Summary":
        """Summary of the arrivals after ``warm_s``; tokens over all of them."""
        results = [result for result in run.results if result.arrival.at_s >= warm_s]
        met = sum(result.met for result in results)
        late = sum(worker.tokens_late for worker in run.workers)
        tokens = sum(result.tokens for result in results) + late
        wasted = late + sum(
            result.tokens
            for result in results
            if not result.met and result.outcome is not Outcome.PARTIAL
        )
        ttft = [1000 * (f.first_s - f.arrival.at_s) for f in results if f.first_s]
        return cls(
            goodput=met / (run.seconds - warm_s),
            attainment=met / len(results),
            waste=wasted / tokens if tokens else 0.0,
            ttft_p50_ms=percentile(ttft, 50),
        )
