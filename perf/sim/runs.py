"""Runs of several calls under one deadline, by the information that clients send (DL-22).

An agent makes several calls, one after the other, with tool time between them. Its user waits for
the last answer. Other requests arrive among the agents' calls. A run is met if its last answer is
in time; it ends if a call fails. ``SHORT`` runs have two to ten calls with independent prompts.
``LONG`` runs have ten to forty calls. Their prompts contain the whole conversation, up to about
100,000 tokens, which the instance's prefix cache may still have. A load of 1 is the work that keeps
every slot busy all the time, if each context is computed once.

The same runs at the same times, with each of our modes:

- ``nothing``   every call states only the run's deadline
- ``learnt``    every call states the run's deadline and its session; the service learns how many
  calls usually follow
- ``split``     every call has its own equal share of the deadline
- ``calls``     every call states the run's deadline, and how many calls follow

and with others' schedulers (``rivals``), where every call states the run's deadline and its client
hangs up at that time: ``fifo``, ``jitserve``, and ``jitserve-stages`` with that paper's rule for
requests of several stages.
"""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from orchestrator.service import Orchestrator
from perf.load.workload import Sizes
from perf.report.bundle import Figure
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.replay.loop import VirtualClock
from perf.sim.replay.worker import WorkerSpec
from perf.sim.rivals.fleet import EngineFigures, Job, Rival, RivalFleet
from perf.sim.rivals.policies import Fifo, JitServe, JitServeStages
from perf.sim.scenes import FLEET, SPEED, UNBOUNDED, Engine
from perf.sim.simulate import Driver, Fleet, SimResult, new_job, simulate
from perf.sim.study import Case
from worker.runner.synthetic import StepCost

MANNERS = ("nothing", "learnt", "split", "calls")
RIVALS: Mapping[str, Callable[[EngineFigures], Rival]] = {
    "fifo": Fifo,
    "jitserve": JitServe,
    "jitserve-stages": JitServeStages,
}
AIM = 0.95
"""Share (0 to 1) that ``learnt`` is to keep of the runs that ``calls`` keeps."""
TOOL_S = 0.2
PATIENCE = (2.0, 4.0, 8.0)
MARGIN_MS = 500.0
_LINGER_S = 1.0
_ANSWER_ID = 1
"""Token id that answers consist of."""
_NEWS_IDS = range(1000, 2**18)
_SAMPLE = 2000


# ── the loads ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AgentRun:
    """Run of an agent. ``calls`` state no deadline of their own; ``tools_s`` come after each."""

    at_s: float
    agent: str
    calls: Sequence[SimArrival]
    tools_s: Sequence[float]
    deadline_ms: float
    opening: tuple[int, ...] = ()
    """Instructions that the context begins with, to which each call's prompt and answer come; empty
    where each prompt is all that its call needs."""

    @property
    def name(self) -> str:
        return f"{self.agent} {self.at_s}"

    def asked(self) -> Iterator[SimArrival]:
        """The calls with what was said before them."""
        said = self.opening
        first = random.Random(self.name).choice(_NEWS_IDS[: -len(self.calls)])
        for number, call in enumerate(self.calls):
            if said:
                said += (first + number,) * call.prompt_tokens
                call = replace(call, prompt_tokens=len(said), opening=said)
            yield call
            if said:
                said = call.prompt + (_ANSWER_ID,) * call.length


Load = Sequence[AgentRun | SimArrival]


class Rates(NamedTuple):
    """Arrivals per second on average."""

    runs_per_s: float
    others_per_s: float


@dataclass(frozen=True, slots=True)
class RunLoad:
    """Rules by which runs are drawn, and the fleet that serves them."""

    name: str
    fleet: Fleet
    others: Scenario
    turns: Scenario
    """The calls of runs, as if each stood alone."""
    calls: Mapping[str, tuple[int, int]]
    """Least and most calls of a run, by agent; any number between is as likely."""
    run_share: float
    """Share (0 to 1) of the work that runs make up."""
    instructions: int = 0
    """Tokens that an agent's context begins with; 0 where contexts do not grow."""
    seconds: float = 30.0
    """Seconds of load after the first ``warm_s``, which do not count."""
    warm_s: float = 15.0

    @property
    def engine(self) -> Engine:
        return Engine(self.name, self.fleet)

    def rates(self, load: float) -> Rates:
        """Rates at ``load`` times what the fleet can do."""
        calls = sum(map(sum, self.calls.values())) / 2 / len(self.calls)
        run_s, other_s = calls * self._work_s(self.turns), self._work_s(self.others)
        fleet = load * self.fleet.count
        return Rates(fleet * self.run_share / run_s, fleet * (1 - self.run_share) / other_s)

    def draw(self, rates: Rates, seconds: float, seed: int) -> list[AgentRun | SimArrival]:
        """Runs and others' requests in order of time."""
        rng = random.Random(seed)
        turns = self.turns.arrivals(1e6, seconds, seed + 1)
        load: list[AgentRun | SimArrival] = []
        load += self.others.arrivals(rates.others_per_s, seconds, seed)
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rates.runs_per_s)) < seconds:
            agent = rng.choice(tuple(self.calls))
            own = [next(turns) for _ in range(rng.randint(*self.calls[agent]))]
            load.append(self._run(at_s, agent, own, rng))
        return sorted(load, key=lambda one: one.at_s)

    def _run(
        self, at_s: float, agent: str, calls: Sequence[SimArrival], rng: random.Random
    ) -> AgentRun:
        tools_s = [rng.expovariate(1 / TOOL_S) for _ in calls]
        speed = self.turns.speed
        service_ms = sum(speed.service_ms(one.prompt_tokens, one.length) for one in calls)
        deadline_ms = rng.choice(PATIENCE) * service_ms + 1000 * sum(tools_s[:-1]) + MARGIN_MS
        own = [replace(one, tenant=agent) for one in calls]
        opening = (2 + list(self.calls).index(agent),) * self.instructions
        return AgentRun(at_s, agent, own, tools_s, deadline_ms, opening)

    def _work_s(self, of: Scenario) -> float:
        """Seconds that one instance needs for a request, with every slot full."""
        rng, machine = random.Random(0), self.engine.machine
        prompts = sum(of.prompts.draw(rng) for _ in range(_SAMPLE)) / _SAMPLE
        answers = sum(of.answers.draw(rng) for _ in range(_SAMPLE)) / _SAMPLE
        return machine.prompt_token_s * prompts + machine.token_s * answers / machine.slots


_SCENARIO = Scenario(SPEED, open_share=1.0)
SHORT = RunLoad(
    "short",
    FLEET,
    others=_SCENARIO,
    turns=_SCENARIO,
    calls={"planner": (2, 4), "coder": (5, 10)},
    run_share=0.5,
)
_LONG_COST = StepCost(5e-3, 0.5e-3, 0.05e-3)
_LONG_SPEC = WorkerSpec(_LONG_COST, 16, kv_tokens=1_200_000, step_tokens=2048, prefix_cache=True)
# Large blocks: small ones would take half of the time to name.
_LONG_FLEET = Fleet(_LONG_SPEC, 1, context_tokens=131_072, block_tokens=64)
_LONG_OTHERS = Scenario(Engine("long", _LONG_FLEET).speed, open_share=1.0)
LONG = RunLoad(
    "long",
    _LONG_FLEET,
    others=_LONG_OTHERS,
    turns=replace(_LONG_OTHERS, prompts=Sizes(median=2200, sigma=0.5, least=500, most=6000)),
    calls={"researcher": (10, 20), "engineer": (25, 40)},
    run_share=0.8,
    instructions=2000,
    seconds=90.0,
    warm_s=40.0,
)
LOADS = {one.name: one for one in (SHORT, LONG)}


# ── ours, and the rivals ─────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class KeptRuns:
    """Numbers of runs and of others' requests, and of those that were kept."""

    runs: int = 0
    runs_kept: int = 0
    others: int = 0
    others_kept: int = 0

    @property
    def run_share(self) -> float:
        return self.runs_kept / max(1, self.runs)

    @property
    def other_share(self) -> float:
        return self.others_kept / max(1, self.others)

    def add(self, run: AgentRun, done: int) -> None:
        """Count a run that is over, of whose calls ``done`` were met."""
        is_kept = done == len(run.calls)
        self.runs_kept += is_kept


class RunsDriver(Driver):
    """Makes the calls of runs, each when its tool is done, and sends others' requests."""

    manner = "nothing"
    warm_s = 0.0

    def __init__(
        self, orchestrator: Orchestrator, clock: VirtualClock, states_deadline: bool
    ) -> None:
        super().__init__(orchestrator, clock, states_deadline)
        self.kept = KeptRuns()

    async def submit(self, arrival: Any, result: SimResult, name: str) -> None:
        """Send a request, or play a run to its end."""
        one: AgentRun | SimArrival = arrival
        counts = one.at_s >= self.warm_s
        if isinstance(one, SimArrival):
            self.kept.others += counts
            await super().submit(one, result, name)
            self.kept.others_kept += counts and result.met
            return
        self.kept.runs += counts  # now: it may still wait for a tool when the simulation ends
        ends_at, done = self.clock.now() + one.deadline_ms / 1000, 0
        for call, tool_s in zip(one.asked(), one.tools_s, strict=True):
            left_ms, to_come = 1000 * (ends_at - self.clock.now()), len(one.calls) - 1 - done
            said: dict[str, Any] = {}
            if self.manner == "split":
                left_ms = min(left_ms, one.deadline_ms / len(one.calls))
            elif self.manner == "learnt":
                said = {"session_id": one.name}
            elif self.manner == "calls":
                said = {"calls_left": to_come}
            of_call = SimResult(replace(call, at_s=self.clock.now(), deadline_ms=left_ms))
            job, prompt = new_job(call, self.clock.now(), left_ms)
            await self.ask(replace(job, **said), prompt, of_call)
            if not of_call.met:
                break
            done += 1
            if to_come:
                await asyncio.sleep(tool_s)
        result.endings += 1
        if counts:
            self.kept.add(one, done)


def measure(load: Load, manner: str, fleet: Fleet, *, seed: int, warm_s: float = 15.0) -> KeptRuns:
    """Simulate one manner under one load; what comes in the first ``warm_s`` is not counted."""
    drivers: list[RunsDriver] = []

    def new_driver(*given: Any) -> RunsDriver:
        driver = RunsDriver(*given)
        driver.manner, driver.warm_s = manner, warm_s
        drivers.append(driver)
        return driver

    last_due = max(one.at_s + one.deadline_ms / 1000 for one in load)
    simulate(
        load,  # type: ignore[arg-type]  # runs come as arrivals do
        fleet,
        UNBOUNDED | {"DISPATCH__LEARN_RUNS": str(manner == "learnt")},
        seed=seed,
        linger_s=last_due + _LINGER_S - load[-1].at_s,
        new_driver=new_driver,
    )
    return drivers[0].kept


class _RivalClients:
    """Clients of runs and of other requests before a rival: what they send next, and what they
    keep."""

    def __init__(self, load: Load, policy: Rival, warm_s: float) -> None:
        self.kept = KeptRuns()
        self._policy = policy
        self._warm_s = warm_s
        self._runs = {one.name: one for one in load if isinstance(one, AgentRun)}
        self._asked = {name: run.asked() for name, run in self._runs.items()}
        self._done: Counter[str] = Counter()
        self.kept.runs = sum(run.at_s >= warm_s for run in self._runs.values())

    def first(self, load: Load) -> Iterator[SimArrival]:
        """What clients begin with: requests of their own, or the first calls of runs."""
        for one in load:
            yield one if isinstance(one, SimArrival) else self._next(one, one.at_s)

    def then(self, job: Job) -> SimArrival | None:
        """What the client of an ended job sends next."""
        session, counts = job.arrival.session, job.arrival.at_s >= self._warm_s
        job.arrival = replace(job.arrival, opening=())  # long ones would fill the memory
        if not session:
            self.kept.others += counts
            self.kept.others_kept += counts and job.met
            return None
        run = self._runs[session]
        self._done[session] += job.met
        done = self._done[session]
        at_s = job.ended_at + run.tools_s[done - 1]
        if job.met and done < len(run.calls) and at_s < run.at_s + run.deadline_ms / 1000:
            return self._next(run, at_s)
        if job.met and done == len(run.calls) and isinstance(self._policy, JitServeStages):
            self._policy.run_over(run.agent, session)
        if run.at_s >= self._warm_s:
            self.kept.add(run, done)
        return None

    def _next(self, run: AgentRun, at_s: float) -> SimArrival:
        left_ms = run.deadline_ms - 1000 * (at_s - run.at_s)
        call = next(self._asked[run.name])
        return replace(call, at_s=at_s, deadline_ms=left_ms, session=run.name)


def measure_rival(
    load: Load, name: str, of: RunLoad, *, seed: int, warm_s: float = 15.0
) -> KeptRuns:
    """Simulate one rival under one load."""
    policy = RIVALS[name](of.engine.machine)
    clients = _RivalClients(load, policy, warm_s)
    fleet = RivalFleet(of.fleet.spec, of.fleet.count, policy, seed)
    fleet.run(clients.first(load), clients.then)
    return clients.kept


# ── the study ────────────────────────────────────────────────────────────────────────────────────


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [*MANNERS, *RIVALS]
    parser.add_argument("--runs", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--manners", nargs="+", choices=names, default=names)
    parser.set_defaults(loads=[0.6, 0.9, 1.2, 1.6])


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each kind of run and each load."""
    for of in (LOADS[name] for name in args.runs):
        for load in args.loads:
            what = f"{of.name} runs at {load:g} times the capacity"

            def figures(of: RunLoad = of, load: float = load) -> list[Figure]:
                return figures_of(of, load, args.manners, args.seconds, args.seeds)

            yield Case(f"chains-{of.name}-{load:g}x", what, figures)


def figures_of(
    of: RunLoad, load: float, manners: Sequence[str], seconds: float | None, seeds: int
) -> list[Figure]:
    """Figures of every manner at one load, a sample for each seed."""
    rates, above = of.rates(load), f"{of.name}.{load:g}x"
    kept: dict[str, list[KeptRuns]] = {}
    for manner in manners:
        for seed in range(seeds):
            drawn = of.draw(rates, of.warm_s + (seconds or of.seconds), seed)
            if manner in RIVALS:
                one = measure_rival(drawn, manner, of, seed=seed, warm_s=of.warm_s)
            else:
                one = measure(drawn, manner, of.fleet, seed=seed, warm_s=of.warm_s)
            kept.setdefault(manner, []).append(one)
    found = []
    for manner, cells in kept.items():
        for key, label, shares in (
            ("runs", "runs kept", [one.run_share for one in cells]),
            ("others", "other requests kept", [one.other_share for one in cells]),
        ):
            name = f"{above}.{manner}.{key}"
            found.append(Figure.of(name, f"{manner}: {label}", "", shares, better="higher"))
    if {"learnt", "calls"} <= set(kept):
        pairs = zip(kept["learnt"], kept["calls"], strict=True)
        ratios = [learnt.run_share / known.run_share for learnt, known in pairs if known.run_share]
        label = f"runs kept, learnt ÷ calls known (aim: {AIM:g})"
        found.append(Figure.of(f"{above}.ratio", label, "", ratios, better="higher"))
    return found
