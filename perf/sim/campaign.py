"""Compares policies cell by cell (``scenes``), over several seeds.

Our policies run as the real orchestrator and workers (``simulate``), the rivals on the same step
costs (``rivals``). Answer lengths are hidden from every policy except the upper bound. Each client
judges on its own clock if its request was met. Clients of every policy hang up when their request
cannot be met any more.

``ours`` decides how many rows run at once, up to the engine's slots. Every policy also runs with
fixed numbers of rows, such as ``fifo@16``. The best of these per cell is an upper bound that nobody
could choose in advance.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

from perf.goodput.policies import FIXED_ROWS
from perf.report.bundle import Better, Figure
from perf.report.stats import median
from perf.sim.arrivals import SimArrival
from perf.sim.rivals.fleet import RivalFleet
from perf.sim.rivals.policies import RIVALS
from perf.sim.scenes import UNBOUNDED, SimScene
from perf.sim.simulate import simulate
from protocol import Outcome

ROWS = (4, 8, 16, 32, 64)
"""Fixed numbers of rows that policies also run with."""
WARM_S = 8.0
_LINGER_S = 20.0

OURS, KNOWN, UNPREDICTED = "ours", "known", "no-prediction"
LABELS = {
    OURS: "Tidegate",
    KNOWN: "Tidegate, lengths known",
    UNPREDICTED: "Tidegate without prediction",
    **{name: label for name, (label, _) in RIVALS.items()},
}
_SETTINGS: dict[str, Mapping[str, str]] = {
    UNPREDICTED: {"QUEUE__ORDER": "deadline", "ADMISSION__MODE": "off"},
}


@dataclass(frozen=True, slots=True)
class RowsPolicy:
    """A policy with at most ``rows`` at once, whatever the slots; None leaves the number to it."""

    name: str
    rows: int | None = None

    @property
    def key(self) -> str:
        return self.name if self.rows is None else f"{self.name}@{self.rows}"

    @property
    def label(self) -> str:
        return LABELS[self.name] + ("" if self.rows is None else f", {self.rows} rows")


@dataclass(frozen=True, slots=True)
class CellRun:
    """Figures of one run; shares are 0 to 1. ``focus`` is NaN where a cell has none."""

    goodput: float
    attainment: float
    waste: float
    tokens_per_s: float
    refused: float
    focus: float = math.nan


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One run to be made."""

    scene: SimScene
    policy: RowsPolicy
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SimCell:
    """One policy in one cell, over all seeds."""

    scene: SimScene
    policy: RowsPolicy
    runs: tuple[CellRun, ...]
    """Runs in the order of the seeds, by which policies pair."""

    def values(self, metric: str) -> list[float]:
        """Values of one field of ``CellRun``, seed by seed."""
        return [getattr(run, metric) for run in self.runs]

    def median(self, metric: str) -> float:
        return median(self.values(metric))

    def figures(self) -> list[Figure]:
        def figure(name: str, metric: str, unit: str, better: Better) -> Figure:
            return Figure.of(
                f"{self.scene.key}.{self.policy.key}.{name}",
                f"{self.policy.label}, {self.scene}: {name.replace('_', ' ')}",
                unit,
                self.values(metric),
                better=better,
            )

        figures = [
            figure("goodput_per_s", "goodput", "requests/s", "higher"),
            figure("attainment", "attainment", "", "higher"),
            figure("waste", "waste", "", "neither"),
            figure("tokens_per_s", "tokens_per_s", "tokens/s", "neither"),
            figure("refused", "refused", "", "neither"),
        ]
        if self.scene.focus:
            figures.append(figure(f"attainment_{self.scene.focus}", "focus", "", "higher"))
        return figures


@dataclass(frozen=True, slots=True)
class _Fate:
    """Outcome of one request under any policy."""

    arrival: SimArrival
    met: bool
    tokens: int
    refused: bool = False


def run_cell(spec: CellSpec) -> CellRun:
    """Simulate one run in this process."""
    arrivals = spec.scene.source.arrivals(spec.seconds + WARM_S, spec.seed)
    fates = (_run_rival if spec.policy.name in RIVALS else _run_ours)(spec, arrivals)
    fates = [fate for fate in fates if fate.arrival.at_s >= WARM_S]
    made = sum(fate.tokens for fate in fates)
    kept = sum(fate.tokens for fate in fates if fate.met)
    met = sum(fate.met for fate in fates)
    focus = [fate.met for fate in fates if fate.arrival.kind == spec.scene.focus]
    return CellRun(
        goodput=met / spec.seconds,
        attainment=met / len(fates),
        waste=1 - kept / made if made else 0.0,
        tokens_per_s=made / spec.seconds,
        refused=sum(fate.refused for fate in fates) / len(fates),
        focus=sum(focus) / len(focus) if spec.scene.focus else math.nan,
    )


def _run_ours(spec: CellSpec, arrivals: list[SimArrival]) -> list[_Fate]:
    policy, fleet = spec.policy, spec.scene.engine.fleet
    settings = UNBOUNDED | dict(_SETTINGS.get(policy.name, {}))
    if policy.rows is not None:
        settings |= FIXED_ROWS
        fleet = spec.scene.engine.with_rows(policy.rows).fleet
    if policy.name == KNOWN:
        arrivals = [replace(arrival, max_tokens=arrival.length) for arrival in arrivals]
    run = simulate(arrivals, fleet, settings, seed=spec.seed, linger_s=_LINGER_S)
    return [
        _Fate(result.arrival, result.met, result.tokens, result.outcome is Outcome.REFUSED)
        for result in run.results
    ]


def _run_rival(spec: CellSpec, arrivals: list[SimArrival]) -> list[_Fate]:
    engine = spec.scene.engine
    if spec.policy.rows is not None:
        engine = engine.with_rows(spec.policy.rows)
    _, rival = RIVALS[spec.policy.name]
    fleet = RivalFleet(engine.fleet.spec, engine.fleet.count, rival(engine.machine), spec.seed)
    return [_Fate(job.arrival, job.met, job.made) for job in fleet.run(arrivals)]


def policies_of(names: Iterable[str], rows: Sequence[int], scene: SimScene) -> list[RowsPolicy]:
    """Policies of a cell, by name as they are and with fixed numbers of rows.

    Ours decides how many of the slots it uses, rivals use them all; ceilings and ablations have no
    fixed rows.
    """
    slots = scene.engine.slots
    fewer = sorted(each for each in set(rows) if each < slots)
    found = []
    for name in names:
        found.append(RowsPolicy(name))
        if name in RIVALS or name == OURS:
            found += [RowsPolicy(name, each) for each in fewer]
        if name == OURS and rows:
            found.append(RowsPolicy(name, slots))
    return found


def run_campaign(
    scenes: Sequence[SimScene],
    *,
    only: Sequence[str],
    rows: Sequence[int],
    seeds: Sequence[int],
    seconds: float,
    processes: int,
) -> Iterable[SimCell]:
    """Run all cells; yields each as it is done. ``only`` are policies, by name or key
    (``ours@16``)."""
    cells = [
        (scene, policy)
        for scene in scenes
        for policy in policies_of(LABELS, rows, scene)
        if {policy.name, policy.key} & set(only)
    ]
    specs = [CellSpec(scene, policy, seed, seconds) for scene, policy in cells for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        runs = pool.map(run_cell, specs)
        for scene, policy in cells:
            yield SimCell(scene, policy, tuple(islice(runs, len(seeds))))
