"""``python -m perf.sim.explained``: how far explanations of misses can be trusted.

A load is simulated, and recorded by its orchestrator as any service records; then misses are
explained from the recording alone. That knows neither how long answers would have become that were
cut, nor how the times of steps scattered. What its replay comes to is compared with what was
recorded, and what it says of a change with a simulation of the same load with that change.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from orchestrator.recording.explainer import Explainer
from orchestrator.recording.facts import RecordedRequest
from orchestrator.recording.findings import Alone, Findings, ReplayQuestion, Tried
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, result
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.scenes import FLEET, SPEED, UNBOUNDED, capacity_per_s
from perf.sim.simulate import Fleet, SimRun, simulate
from pool.replay.verdict import explain

LOADS: Final = (0.8, 1.3, 2.0)
SCENARIOS: Final[Mapping[str, Scenario]] = {
    "known": Scenario(SPEED),
    "open": Scenario(SPEED, open_share=1.0),
}
"""Loads by whether the lengths of their answers are known beforehand."""
WARM_S: Final = 7.0
_LINGER_S: Final = 0.5
TOLERANCE_MS: Final = 100.0
"""How much later than said a deadline may have to be: it is told to 100 ms."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A simulation, and what its orchestrator recorded of it."""

    arrivals: Sequence[SimArrival]
    seed: int
    fleet: Fleet
    run: SimRun

    @classmethod
    def of(
        cls, scenario: Scenario, per_s: float, seconds: float, seed: int, fleet: Fleet = FLEET
    ) -> "RecordedRun":
        """Simulate and record a load."""
        arrivals = list(scenario.arrivals(per_s, seconds, seed))
        return cls(arrivals, seed, fleet, simulate(arrivals, fleet, UNBOUNDED, seed=seed))

    @property
    def explainer(self) -> Explainer:
        """The explainer of the service that was simulated."""
        found = self.run.orchestrator.stages.explainer
        assert found is not None
        return found

    def misses(self, most: int) -> list[RecordedRequest]:
        """Misses from all of the time after the warm-up, at most so many."""
        found = [one for one in self.explainer.recorder if one.is_miss and one.arrived > WARM_S]
        return found[:: max(1, -(-len(found) // most))]

    def question(self, request: RecordedRequest) -> ReplayQuestion:
        """The question that a service would ask of a replaying process, without a bound on time."""
        return self.explainer.question(request, budget_s=1e6)

    def is_met(self, request: RecordedRequest, tried: Tried) -> bool | None:
        """Whether the request is met in a simulation with that change; None where the simulator
        cannot make it."""
        away = [abs(arrival.at_s - request.arrived) for arrival in self.arrivals]
        number, fleet, kept = away.index(min(away)), self.fleet, None
        arrivals = list(self.arrivals)
        match tried.change:
            case Alone.LATER_DEADLINE:
                more_ms = tried.by_ms + (TOLERANCE_MS if tried.met else 0.0)
                own = arrivals[number]
                arrivals[number] = replace(own, deadline_ms=own.deadline_ms + more_ms)
            case Alone.ONE_MORE_INSTANCE:
                fleet = replace(fleet, count=fleet.count + 1)
            case Alone.LET_IN:
                kept = number
            case Alone.NOBODY_ELSE:
                arrivals, number = [arrivals[number]], 0
            case Alone.NOT_PAUSED:
                return None
        own = arrivals[number]
        over_s = own.at_s + own.deadline_ms / 1000  # what comes later makes no difference
        arrivals = [arrival for arrival in arrivals if arrival.at_s <= over_s]
        linger_s = _LINGER_S + over_s - arrivals[-1].at_s
        run = simulate(arrivals, fleet, UNBOUNDED, seed=self.seed, kept=kept, linger_s=linger_s)
        return run.results[number].met

    def checked(self, request: RecordedRequest, found: Findings) -> Iterator[bool]:
        """Whether each thing that was found holds in a simulation."""
        for tried in found.tried:
            met = self.is_met(request, tried)
            if met is not None:
                yield met is tried.met


@dataclass(slots=True)
class ExplainedTally:
    """What came of the explanations of one load."""

    compared: int = 0
    agreed: int = 0
    reproduced: list[bool] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)

    def add(self, found: Findings, held: Sequence[bool]) -> None:
        """Count an explanation, and which of its findings held in a simulation."""
        self.compared += found.compared
        self.agreed += found.agreed
        self.reproduced.append(found.is_reproduced)
        self.held += held
        self.took_ms.append(found.took_ms)

    def figures(self, above: str, what: str) -> Iterator[Figure]:
        """Shares over all explanations, and the CPU time of one; keys begin with ``above``."""
        shares = (
            ("agreement", "met or not in the replay as recorded", self.agreed, self.compared),
            ("reproduced", "misses that miss again", sum(self.reproduced), len(self.reproduced)),
            ("holds", "findings that hold in a simulation", sum(self.held), len(self.held)),
        )
        for key, label, count, of in shares:
            if of:
                name = f"{above}.{key}"
                yield Figure.of(name, f"{what}: {label}", "", [count / of], better="higher")
        if self.took_ms:
            yield Figure.of(f"{above}.took_ms", f"{what}: CPU time of one", "ms", self.took_ms)


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS, metavar="TIMES")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each load")
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    parser.add_argument("--misses", type=int, default=8, metavar="N", help="explained of each run")
    parser.add_argument(
        "--checked", type=int, default=3, metavar="N", help="of these, held against simulations"
    )
    args = parser.parse_args(argv)
    recording, console = begin(parser, args, "perf.sim.explained", *argv, seed=1), new_console()
    results: list[BenchResult] = []
    for name, scenario in SCENARIOS.items():
        capacity = capacity_per_s(scenario, FLEET, 1)
        for load in args.loads:
            what = f"lengths {name}, {load:g}x"
            with result(results, f"explained-{name}-{load:g}x", what) as figures:
                tally = ExplainedTally()
                for seed in range(1, args.seeds + 1):
                    run = RecordedRun.of(scenario, load * capacity, args.seconds, seed)
                    for number, request in enumerate(run.misses(args.misses)):
                        found = explain(run.question(request))
                        is_checked = number < args.checked
                        tally.add(found, list(run.checked(request, found)) if is_checked else ())
                figures += tally.figures(f"{name}.{load:g}x", what)
            for one in figures:
                console.print(f"{one.label}: {one.median:.3f}{one.unit and ' ' + one.unit}")
    recording.save(recording.bundle(results))
    return 1 if any(one.failed for one in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
