"""Policies compared on real traces: cells of trace × arrivals × deadlines × load × policy × seed.

Ours run as the real orchestrator and workers (``simulate``), the rivals on the same step costs
(``rivals``). Every answer's length is hidden but for the ceiling, which is given it. What a client
meets is judged by its own clock, and clients of every policy hang up when what they asked for is
out of reach.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from perf.load.trace import ANSWER_SCALE, CHAT, CODE, Manner, Row, TraceLoad, read_trace
from perf.load.workload import Speed
from perf.report.bundle import Figure
from perf.report.stats import percentile
from perf.sim.arrivals import Arrival, trace_arrivals
from perf.sim.rivals.fleet import Machine, RivalFleet
from perf.sim.rivals.policies import RIVALS
from perf.sim.simulate import Fleet, simulate
from perf.sim.worker import WorkerSpec
from worker.protocol import Outcome
from worker.runner.synthetic import StepCost

# perf.engine.fit_step_time on the demo model, 2 cores, slowed five times as in perf.goodput.
STEP_COST = StepCost(6.4e-3, 0.635e-3, 0.44e-3)
SLOTS = 8
INSTANCES = 2
# Token counts and fixed deadlines are scaled, so is the least that a worker starts with.
SPEC = WorkerSpec(STEP_COST, SLOTS, kv_tokens=SLOTS * 1024, min_start_s=0.1 / ANSWER_SCALE)
FLEET = Fleet(SPEC, INSTANCES)
SPEED = Speed(1000 * STEP_COST.prompt_token_s, 1000 * (STEP_COST.step_s + STEP_COST.row_s * SLOTS))
MACHINE = Machine(SLOTS, STEP_COST.prompt_token_s, STEP_COST.step_s + STEP_COST.row_s * SLOTS)
WARM_S = 8.0
_LINGER_S = 20.0
_FLOOD = 600

OURS, KNOWN, UNPREDICTED = "ours", "known", "no-prediction"
LABELS = {
    OURS: "Tidegate",
    KNOWN: "Tidegate, lengths known",
    UNPREDICTED: "Tidegate without prediction",
    **{name: label for name, (label, _) in RIVALS.items()},
}
_SETTINGS = {
    OURS: {},
    KNOWN: {},
    UNPREDICTED: {"QUEUE_ORDER": "deadline", "ADMISSION": "off"},
}


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One run."""

    trace: Path
    arrivals: str
    """``poisson`` or ``trace``."""
    manner: Manner
    load: float
    policy: str
    seed: int
    seconds: float
    capacity: float


@dataclass(frozen=True, slots=True)
class CellRun:
    """What one run came to; shares are 0 to 1."""

    goodput: float
    attainment: float
    waste: float
    refused: float
    started: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy at a load over all seeds: means, and the lowest and highest goodput."""

    trace: str
    arrivals: str
    manner: str
    load: float
    policy: str
    label: str
    capacity: float
    goodput: float
    low: float
    high: float
    attainment: float
    waste: float
    refused: float
    runs: tuple[float, ...]
    """Goodput seed by seed: policies pair by seed."""

    def figures(self) -> list[Figure]:
        key = f"{self.trace}.{self.arrivals}.{self.manner}.{self.load:g}x.{self.policy}"
        what = f"{self.label}, {self.trace}, {self.arrivals}, {self.manner}, {self.load:g} ×"
        n = len(self.runs)

        def plain(name: str, label: str, value: float) -> Figure:
            return Figure(
                key=f"{key}.{name}",
                label=f"{what}: {label}",
                unit="",
                median=value,
                low=value,
                high=value,
                spread="min–max",
                n=n,
                better="neither",
            )

        goodput = Figure.of(
            f"{key}.goodput_per_s",
            f"{what}: goodput",
            "requests/s",
            list(self.runs),
            better="higher",
        )
        return [
            goodput,
            plain("attainment", "attainment", self.attainment),
            plain("waste", "waste", self.waste),
            plain("refused", "refused", self.refused),
        ]


def load_of(trace: Path, arrivals: str, manner: Manner) -> TraceLoad:
    """The requests of a trace file; those of code completion are known by its name."""
    rows = _ROWS.get(trace)
    if rows is None:
        rows = _ROWS[trace] = tuple(read_trace(trace))
    applications = CODE if "code" in trace.stem else CHAT
    return TraceLoad(rows, SPEED, manner, arrivals == "poisson", applications)


_ROWS: dict[Path, tuple[Row, ...]] = {}


def capacity_of(trace: Path) -> float:
    """Requests per second with every slot full: the middle of a flood without deadlines."""
    load = load_of(trace, "poisson", Manner.PROPORTIONAL)
    flood = [
        replace(arrival, deadline_ms=math.inf)
        for arrival in trace_arrivals(load, _FLOOD / 0.6, 0.6, seed=1)
    ]
    _, fifo = RIVALS["fifo"]
    jobs = RivalFleet(SPEC, INSTANCES, fifo(MACHINE), seed=1).run(flood)
    ends = [job.ended_at for job in jobs]
    return 0.7 * len(ends) / (percentile(ends, 85) - percentile(ends, 15))


def run_cell(spec: CellSpec) -> CellRun:
    """One run, on this process."""
    load = load_of(spec.trace, spec.arrivals, spec.manner)
    arrivals = list(
        trace_arrivals(
            load,
            spec.load * spec.capacity,
            spec.seconds + WARM_S,
            spec.seed,
            known=spec.policy == KNOWN,
        )
    )
    if spec.policy in RIVALS:
        return _run_rival(spec, arrivals)
    settings = {"QUEUE_SIZE": "-1"} | _SETTINGS[spec.policy]
    run = simulate(arrivals, FLEET, settings, seed=spec.seed, linger_s=_LINGER_S)
    results = [result for result in run.results if result.arrival.at_s >= WARM_S]
    made = sum(result.tokens for result in results)
    kept = sum(result.tokens for result in results if result.met)
    met = sum(result.met for result in results)
    return CellRun(
        met / spec.seconds,
        met / len(results),
        1 - kept / made if made else 0.0,
        sum(result.outcome is Outcome.REFUSED for result in results) / len(results),
        sum(result.first_s > 0 for result in results) / len(results),
    )


def _run_rival(spec: CellSpec, arrivals: list[Arrival]) -> CellRun:
    _, policy = RIVALS[spec.policy]
    fleet = RivalFleet(SPEC, INSTANCES, policy(MACHINE), spec.seed)
    jobs = [job for job in fleet.run(arrivals) if job.arrived >= WARM_S]
    made = sum(job.made for job in jobs)
    kept = sum(job.made for job in jobs if job.met)
    met = sum(job.met for job in jobs)
    started = sum(job.made > 0 for job in jobs) / len(jobs)
    waste = 1 - kept / made if made else 0.0
    return CellRun(met / spec.seconds, met / len(jobs), waste, 0.0, started)


def run_campaign(
    traces: Sequence[Path],
    *,
    arrivals: Sequence[str],
    manners: Sequence[Manner],
    loads: Sequence[float],
    policies: Sequence[str],
    seeds: Sequence[int],
    seconds: float,
    processes: int,
) -> Iterable[Cell]:
    """All cells, one after the other as they are done."""
    with ProcessPoolExecutor(processes) as pool:
        capacities = dict(zip(traces, pool.map(capacity_of, traces), strict=True))
        keys = list(product(traces, arrivals, manners, loads, policies))
        specs = [
            CellSpec(trace, arrival, manner, load, policy, seed, seconds, capacities[trace])
            for trace, arrival, manner, load, policy in keys
            for seed in seeds
        ]
        runs = pool.map(run_cell, specs)
        for trace, arrival, manner, load, policy in keys:
            own = [next(runs) for _ in seeds]
            goodput = [run.goodput for run in own]
            yield Cell(
                trace=_short(trace),
                arrivals=arrival,
                manner=manner.value,
                load=load,
                policy=policy,
                label=LABELS[policy],
                capacity=capacities[trace],
                goodput=sum(goodput) / len(own),
                low=min(goodput),
                high=max(goodput),
                attainment=sum(run.attainment for run in own) / len(own),
                waste=sum(run.waste for run in own) / len(own),
                refused=sum(run.refused for run in own) / len(own),
                runs=tuple(goodput),
            )


def _short(trace: Path) -> str:
    return (
        "code" if "code" in trace.stem else "conversation" if "conv" in trace.stem else trace.stem
    )
