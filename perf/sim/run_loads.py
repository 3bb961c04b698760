"""Loads of agents' runs, several calls under one deadline, with others' requests between them.

An agent makes some calls, one after the other, with a tool's time between them. ``SHORT`` runs have
two to ten calls, each with a prompt of its own. The calls of ``LONG`` runs, ten to forty, have in
their prompts all that was said before, up to about 100,000 tokens, which the instance's prefix
cache may still know.

A load of 1 is the work that fills every slot all the time, with each context computed once.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perf.load.workload import Sizes
from perf.sim.__main__ import FLEET, SPEED
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.scenes import Engine
from perf.sim.simulate import Fleet
from worker.runner.synthetic import StepCost

TOOL_S = 0.2
PATIENCE = (2.0, 4.0, 8.0)
MARGIN_MS = 500.0
_ANSWER_ID = 1
"""Token id that answers consist of."""
_NEWS_IDS = range(1000, 2**18)
_SAMPLE = 2000


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
_LONG_SLOTS = 16
_LONG_COST = StepCost(5e-3, 0.5e-3, 0.05e-3)
_LONG_SPEC = WorkerSpec(
    _LONG_COST, _LONG_SLOTS, kv_tokens=1_200_000, step_tokens=2048, prefix_cache=True
)
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
