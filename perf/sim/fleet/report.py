"""Figures of a run, and of a cell over its seeds."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from perf.report.bundle import Better, Figure
from perf.report.stats import median, percentile
from perf.sim.fleet.scene import FLOODER, FleetScene
from perf.sim.fleet.sharing import Sharing
from perf.sim.fleet.world import FleetRun

K = TypeVar("K", int, str)


class FleetFigures(msgspec.Struct, frozen=True):
    """Figures of one run. Shares are 0 to 1; NaN where a run has nothing of the kind."""

    met: float
    """Share of the requests whose deadline was kept."""
    waste: float
    """Share of all tokens made that were of answers which came too late."""
    wait_p99_ms: float
    """Wait of requests that got a slot, from the arrival to the slot, wherever they waited."""
    found_full: float
    """Share of what was sent that found no slot free there: another had counted on it too."""
    fair_doors: float
    """Jain's index of the orchestrators' shares of kept deadlines."""
    first_door: float
    """Share of kept deadlines at the first orchestrator, which an uneven balancer gives more."""
    fair_tenants: float
    """Jain's index of what tenants were met of what is theirs by max-min fairness."""
    other_tenants: float
    """Share of kept deadlines of the tenants beside the one that floods."""

    @classmethod
    def of(cls, run: FleetRun) -> "FleetFigures":
        """Figures of the requests that count."""
        counted = run.counted
        met = [request for request in counted if request.is_met]
        made = sum(request.made for request in counted)
        kept = sum(request.made for request in met)
        waits = [1000 * (r.started - r.arrived) for r in counted if r.started is not None]
        doors = _met_by((request.door, request.is_met) for request in counted)
        tenants = _met_by((request.tenant, request.is_met) for request in counted)
        others = [request.is_met for request in counted if request.tenant != FLOODER]
        return cls(
            met=len(met) / len(counted),
            waste=1 - kept / made if made else 0.0,
            wait_p99_ms=percentile(waits, 99) if waits else math.nan,
            found_full=run.found_full / max(1, run.sent),
            fair_doors=jain([kept / offered for kept, offered in doors.values()]),
            first_door=doors[0][0] / doors[0][1] if 0 in doors else math.nan,
            fair_tenants=_tenants_fairness(list(tenants.values())),
            other_tenants=sum(others) / max(1, len(others)),
        )


def jain(values: Sequence[float]) -> float:
    """Fairness of equals, from 1 / n to 1 (Jain, Chiu and Hawe, 1984); 1 where nobody has any."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def max_min(offered: Sequence[float], whole: float) -> list[float]:
    """Divide ``whole`` so that nobody gets more than was ``offered``, and who gets least as much as
    can be."""
    given, left = [0.0] * len(offered), whole
    order = sorted(range(len(offered)), key=lambda at: offered[at])
    for place, at in enumerate(order):
        given[at] = min(offered[at], left / (len(offered) - place))
        left -= given[at]
    return given


def _met_by(fates: Iterable[tuple[K, bool]]) -> dict[K, tuple[int, int]]:
    """How many were met, and how many there were, by key."""
    counts: defaultdict[K, list[int]] = defaultdict(lambda: [0, 0])
    for key, is_met in fates:
        counts[key][0] += is_met
        counts[key][1] += 1
    return {key: (met, offered) for key, (met, offered) in counts.items()}


def _tenants_fairness(tenants: Sequence[tuple[int, int]]) -> float:
    whole = sum(met for met, _ in tenants)
    fair = max_min([offered for _, offered in tenants], whole)
    return jain([met / share for (met, _), share in zip(tenants, fair, strict=True) if share])


_FIGURES: tuple[tuple[str, str, str, Better], ...] = (
    ("met", "deadlines kept", "", "higher"),
    ("waste", "tokens of answers that came too late", "", "lower"),
    ("wait_p99_ms", "wait for a slot, p99", "ms", "lower"),
    ("found_full", "sent where no slot was free", "", "lower"),
    ("fair_doors", "fairness between orchestrators", "", "higher"),
    ("first_door", "deadlines kept at the first orchestrator", "", "higher"),
    ("fair_tenants", "fairness between tenants", "", "higher"),
    ("other_tenants", "deadlines kept of tenants that do not flood", "", "higher"),
)


@dataclass(frozen=True, slots=True)
class FleetCell:
    """One way of sharing in one scene, over its seeds."""

    scene: FleetScene
    sharing: Sharing
    runs: tuple[FleetFigures, ...]

    def median(self, name: str) -> float:
        """Median of one field of ``FleetFigures``."""
        return median(self._values(name))

    def figures(self) -> list[Figure]:
        return [
            Figure.of(
                f"{self.scene.name}.{self.sharing.name}.{name}",
                f"{self.sharing.label}, {self.scene}: {label}",
                unit,
                self._values(name),
                better=better,
            )
            for name, label, unit, better in _FIGURES
        ]

    def _values(self, name: str) -> list[float]:
        return [getattr(run, name) for run in self.runs]
