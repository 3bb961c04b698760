"""Cells of a campaign: the requests, their rate, and the engine.

There are three kinds of engine. ``slow`` is the demo model slowed down five times, two instances of
eight slots, as in ``perf.goodput``. ``16``, ``32`` and ``64`` are one instance of the demo model
with that number of slots, on the same two cores as a server and its clients: 6 ms per step with 16
rows, 16.5 ms with 64. ``h100-29``, ``h100-16`` and ``h100-12`` have the step times of an 8B model
on an H100, with that many ms of fixed cost in a step with a prompt. Cells are random
(``perf.load.cells``, and agents with long conversations) or from a trace.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from orchestrator.tasks.job import Priority
from perf.load.cells import CAP_TOKENS, DEMO_COST, Mix, mixes
from perf.load.trace import (
    ANSWER_SCALE,
    CHAT,
    CODE,
    PROMPT_SCALE,
    Manner,
    TraceLoad,
    TraceRow,
    read_trace,
)
from perf.load.workload import Sizes, Speed
from perf.report.stats import percentile
from perf.sim.arrivals import Scenario, SimArrival, trace_arrivals
from perf.sim.replay.worker import WorkerSpec
from perf.sim.rivals.fleet import EngineFigures, RivalFleet
from perf.sim.rivals.policies import Fifo
from perf.sim.simulate import Fleet, simulate
from worker.runner.synthetic import StepCost

_FLOOD = 600
_OPENING_TOKENS = 16
_NEWS = Sizes(median=48, sigma=0.6, least=16, most=200)
_REPLIES = Sizes(median=32, sigma=0.7, least=4, most=160)


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine that serves a cell: a fleet of instances, by name."""

    name: str
    fleet: Fleet
    scales: tuple[int, int] = (PROMPT_SCALE, ANSWER_SCALE)
    """A trace's tokens per token of a prompt and of an answer here."""

    @property
    def slots(self) -> int:
        return self.fleet.spec.slots

    @property
    def speed(self) -> Speed:
        """Times per token of a full engine, in ms."""
        machine = self.machine
        return Speed(1000 * machine.prompt_token_s, 1000 * machine.token_s)

    @property
    def machine(self) -> EngineFigures:
        cost = self.fleet.spec.cost
        step_s = cost.step_s + cost.row_s * self.slots
        return EngineFigures(self.slots, cost.prompt_token_s, step_s)

    def with_rows(self, rows: int) -> "Engine":
        """Engine with at most ``rows`` at once, and the memory of this one."""
        spec = replace(self.fleet.spec, slots=rows)
        return replace(self, fleet=replace(self.fleet, spec=spec))


# The demo model's steps on 2 cores, slowed five times as in perf.goodput.
STEP_COST = StepCost(6.4e-3, 0.635e-3, 0.44e-3)
# Token counts and fixed deadlines of traces are scaled, so is the least that a worker starts with.
SLOW = Engine(
    "slow", Fleet(WorkerSpec(STEP_COST, 8, kv_tokens=8192, min_start_s=0.1 / ANSWER_SCALE), 2)
)
_DEMO_KV_TOKENS = 64 * 2048


def demo(slots: int) -> Engine:
    spec = WorkerSpec(DEMO_COST, slots, _DEMO_KV_TOKENS, min_start_s=0.1 / ANSWER_SCALE)
    return Engine(str(slots), Fleet(spec, 1))


FLEET = Fleet(WorkerSpec(STEP_COST, SLOW.slots, kv_tokens=SLOW.slots * 512))
"""What studies run on: ``SLOW``, whose deadlines are not scaled."""
SPEED = Speed(
    1000 * STEP_COST.prompt_token_s, 1000 * (STEP_COST.step_s + STEP_COST.row_s * SLOW.slots / 2)
)
UNBOUNDED = {"QUEUE__MAX_WAITING": "-1"}


def h100(prompt_ms: int) -> Engine:
    """An H100's shape (docs/gpu.md): decodes take 7 ms, prompts alone reach 43,000 tokens/s, and
    the host launches a step while the one before it runs."""
    cost = StepCost(
        7e-3, 0.0, 1 / 43_000, prompt_step_s=prompt_ms / 1000, launch_s=1e-3, prompt_launch_s=2e-3
    )
    spec = WorkerSpec(cost, 128, kv_tokens=128 * 8192, step_tokens=2048)
    return Engine(f"h100-{prompt_ms}", Fleet(spec, 1), scales=(1, 1))


_ALL = (SLOW, demo(16), demo(32), demo(64), h100(29), h100(16), h100(12))
ENGINES = {engine.name: engine for engine in _ALL}


class CellSource(Protocol):
    """Source of a cell's requests."""

    def arrivals(self, seconds: float, seed: int) -> list[SimArrival]:
        """Requests in order of time; the same for a seed every time."""


@dataclass(frozen=True, slots=True)
class SimScene:
    """One cell. ``focus`` is the kind of request that its table tells apart, if any."""

    name: str
    load: str
    """Load as people read it: ``54/s``, or ``2x`` the capacity."""
    engine: Engine
    source: CellSource
    focus: str = ""

    @property
    def key(self) -> str:
        """Key of the cell's figures; the slow engine's name is left out of it."""
        engine = "" if self.engine.name == SLOW.name else f".{self.engine.name}"
        return f"{self.name}{engine}.{self.load.replace('/', '_per_')}"

    def __str__(self) -> str:
        return f"{self.name}, {self.load}, engine {self.engine.name}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests of a mix of several kinds; prompts of a kind begin alike."""

    mix: Mix

    def arrivals(self, seconds: float, seed: int) -> list[SimArrival]:
        return [
            SimArrival(
                at_s=request.at_s,
                prompt_tokens=request.prompt_tokens,
                max_tokens=CAP_TOKENS,
                length=request.answer_tokens,
                deadline_ms=request.deadline_ms,
                tenant=request.tenant,
                priority=request.priority,
                kind=request.kind,
                opening=(1 + sum(request.kind.encode()),) * _OPENING_TOKENS,
            )
            for request in self.mix.requests(seconds, seed)
        ]


@dataclass(frozen=True, slots=True)
class Agents:
    """Requests of agents' conversations: each turn's prompt is all that was said, and something
    new.

    All begin with the same instructions. A conversation is over after ``turns``; then its agent
    begins another one. Where a load begins, each is somewhere in the first half of its own.
    """

    agents: int
    turns: int = 40
    instructions: int = 512
    news: Sizes = _NEWS
    answers: Sizes = _REPLIES
    every_s: tuple[float, float] = (1.0, 2.0)
    """Seconds from one turn to the next, at least and at most: tools, and the answer before."""
    deadlines_ms: tuple[float, ...] = (500.0, 1000.0, 2000.0)

    @property
    def per_s(self) -> float:
        return 2 * self.agents / sum(self.every_s)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest conversation, and some room."""
        return self.instructions + (self.turns + 2) * (self.news.most + self.answers.most)

    def arrivals(self, seconds: float, seed: int) -> list[SimArrival]:
        many = [
            arrival
            for number in range(self.agents)
            for arrival in self._agent(number, seconds, random.Random(1000 * seed + number))
        ]
        return sorted(many, key=lambda arrival: arrival.at_s)

    def _agent(self, number: int, seconds: float, rng: random.Random) -> Iterator[SimArrival]:
        at_s, turn, conversation = -rng.random(), rng.randrange(self.turns // 2), 0
        said = self._said(number, conversation, turn, rng)
        while (at_s := at_s + rng.uniform(*self.every_s)) < seconds:
            length = self.answers.draw(rng)
            said += (100 * (2 + number) + turn,) * self.news.draw(rng)
            asked = SimArrival(
                at_s=at_s,
                prompt_tokens=len(said),
                max_tokens=CAP_TOKENS,
                length=length,
                deadline_ms=rng.choice(self.deadlines_ms),
                tenant="agents",
                priority=Priority.INTERACTIVE,
                kind="turn",
                opening=said,
                session=f"{number}/{conversation}",
            )
            yield asked
            turn += 1
            if turn == self.turns:
                turn, conversation = 0, conversation + 1
                said = self._said(number, conversation, 0, rng)
            else:
                said = asked.prompt + (1,) * length

    def _said(
        self, number: int, conversation: int, turns: int, rng: random.Random
    ) -> tuple[int, ...]:
        drawn = sum(self.news.draw(rng) + self.answers.draw(rng) for _ in range(turns))
        return (1,) * self.instructions + (100_000 + 100 * number + conversation,) * drawn


@dataclass(frozen=True, slots=True)
class Traced:
    """Requests of a trace, at ``load`` times the capacity of the engine that is to serve them."""

    trace: Path
    arrivals_by: str
    """Origin of arrivals: ``poisson`` or ``trace``."""
    manner: Manner
    load: float
    capacity: float
    """Capacity of the engine in requests per second."""
    engine: Engine

    def arrivals(self, seconds: float, seed: int) -> list[SimArrival]:
        load = load_of(self.trace, self.arrivals_by, self.manner, self.engine)
        return list(trace_arrivals(load, self.load * self.capacity, seconds, seed))


_ROWS: dict[Path, tuple[TraceRow, ...]] = {}


def load_of(trace: Path, arrivals: str, manner: Manner, engine: Engine) -> TraceLoad:
    """Load of a trace's requests for ``engine``; the file's name tells whether they write code."""
    rows = _ROWS.get(trace)
    if rows is None:
        rows = _ROWS[trace] = tuple(read_trace(trace))
    applications = CODE if "code" in trace.stem else CHAT
    is_poisson, (prompt, answer) = arrivals == "poisson", engine.scales
    return TraceLoad(
        rows,
        engine.speed,
        manner,
        is_poisson,
        applications,
        prompt_scale=prompt,
        answer_scale=answer,
    )


def capacity_of(trace: Path, engine: Engine) -> float:
    """Requests per second of a trace with every slot full."""
    load = load_of(trace, "poisson", Manner.PROPORTIONAL, engine)
    flood = [
        replace(arrival, deadline_ms=math.inf)
        for arrival in trace_arrivals(load, _FLOOD / 0.6, 0.6, seed=1)
    ]
    fleet = engine.fleet
    jobs = RivalFleet(fleet.spec, fleet.count, Fifo(engine.machine), seed=1).run(flood)
    return _middle_rate([job.ended_at for job in jobs])


def capacity_per_s(scenario: Scenario, fleet: Fleet, seed: int) -> float:
    """Requests per second of a scenario with every slot full."""
    run = simulate(
        scenario.arrivals(1000.0, 0.6, seed),
        fleet,
        UNBOUNDED | {"QUEUE__ORDER": "fifo", "ADMISSION__MODE": "off"},
        seed=seed,
        states_deadline=False,
        linger_s=600.0,
    )
    return _middle_rate([result.ended_s for result in run.results])


def _middle_rate(ends: Sequence[float]) -> float:
    """Ends per second in the middle of a flood without deadlines."""
    return 0.7 * len(ends) / (percentile(ends, 85) - percentile(ends, 15))


def trace_scenes(
    trace: Path,
    engine: Engine,
    *,
    arrivals: Sequence[str],
    manners: Sequence[Manner],
    loads: Sequence[float],
) -> list[SimScene]:
    """Cells of a trace on an engine. Raises ``TraceError``."""
    capacity = capacity_of(trace, engine)
    stem = trace.stem
    name = "code" if "code" in stem else "conversation" if "conv" in stem else stem
    return [
        SimScene(
            f"{name}.{arrival}.{manner}",
            f"{load:g}x",
            engine,
            Traced(trace, arrival, manner, load, capacity, engine),
        )
        for arrival in arrivals
        for manner in manners
        for load in loads
    ]


CAPACITY_PER_S = 25.0
"""Requests per second of the engine with 64 slots, in facts and stories: see
``perf.load.cells``."""


def drawn_scenes() -> list[SimScene]:
    """Cells that come from no trace."""
    full = ENGINES["64"]
    agents = Agents(36)
    spec = replace(full.fleet.spec, prefix_cache=True)
    fleet = replace(full.fleet, spec=spec, context_tokens=agents.context_tokens)
    return [
        *(
            SimScene(mix.name, f"{mix.per_s:g}/s", engine, Drawn(mix), mix.focus)
            for mix in mixes(CAPACITY_PER_S)
            for engine in (ENGINES["16"], ENGINES["32"], full)
            if engine is full or mix.name in _OF_EVERY_ENGINE
        ),
        SimScene("agents", f"{agents.per_s:g}/s", replace(full, fleet=fleet), agents),
    ]


_OF_EVERY_ENGINE = ("half-capacity", "capacity", "twice")
QUICK = ("capacity", "twice", "bursts", "tight", "flood", "batch", "long-prompts", "agents")
"""Names of the cells that a quick look takes, with 64 slots."""
