"""Runs of several calls under one deadline, and what their clients may say of it.

An agent makes some calls, one after the other, with a tool's time between them, and its user waits
for the last: a planner two to four, a coder five to ten. Between agents come requests of other
kinds. A run is kept when its last answer is there in time; one whose call failed is over. The same
runs at the same times, with each manner:

- ``nothing``   every call states the run's deadline, and no more
- ``learnt``    every call states the run's deadline and its session; the service learns how many
  calls are usually to come
- ``split``     every call has a quarter of it to itself
- ``rest``      every call has an equal share of what is left of it
- ``calls``     every call states the run's deadline, and how many calls are still to come

    python -m perf.sim.chains [--seconds 60] [--loads 0.6 0.9 1.2 1.6] [--seeds 3] [--json PATH]
"""

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import TidegateError
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_parser, result
from perf.sim.__main__ import FLEET, SPEED, UNBOUNDED, capacity_per_s
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from pool.replay.loop import VirtualClock, VirtualLoop, run_quietly
from worker.protocol import Delta, Outcome

CALLS = {"planner": (2, 4), "coder": (5, 10)}
"""Least and most calls of a run, by agent; any number between is as likely."""
RUN_SHARE = 0.5
"""Share (0 to 1) of the work that runs make up."""
TOOL_S = 0.2
PATIENCE = (2.0, 4.0, 8.0)
MARGIN_MS = 500.0
MANNERS = ("nothing", "learnt", "split", "rest", "calls")
SCENARIO = Scenario(SPEED, open_share=1.0)
_LINGER_S = 30.0

UseTool = Callable[[float, float, int], Awaitable[bool]]
"""What an agent does between two calls, by how many seconds its tool takes, how many are left of
the run, and how many calls are to come; whether it has the tool's result."""


async def wait_for_tool(tool_s: float, left_s: float, calls_left: int) -> bool:
    """Wait for as long as the tool takes."""
    await asyncio.sleep(tool_s)
    return True


@dataclass(frozen=True, slots=True)
class AgentRun:
    """Run of an agent. ``calls`` state no deadline of their own; ``tools_s`` come after each."""

    at_s: float
    agent: str
    calls: Sequence[SimArrival]
    tools_s: Sequence[float]
    deadline_ms: float


@dataclass(slots=True)
class KeptRuns:
    """Numbers of runs and of others' requests, and of those that were kept."""

    runs: int = 0
    runs_kept: int = 0
    runs_whole: int = 0
    """Kept ones that had the result of every tool."""
    others: int = 0
    others_kept: int = 0
    wasted_calls: int = 0
    """Calls that were met, in runs that were not kept."""

    @property
    def run_share(self) -> float:
        return self.runs_kept / max(1, self.runs)

    @property
    def whole_share(self) -> float:
        return self.runs_whole / max(1, self.runs)

    @property
    def other_share(self) -> float:
        return self.others_kept / max(1, self.others)


def draw_load(per_s: float, seconds: float, seed: int) -> Iterator[AgentRun | SimArrival]:
    """Runs and others' requests in order of time, ``per_s`` calls of either kind in all."""
    rng = random.Random(seed)
    others = SCENARIO.arrivals((1 - RUN_SHARE) * per_s, seconds, seed)
    calls = SCENARIO.arrivals(1e6, seconds, seed + 1)
    runs: list[AgentRun | SimArrival] = []
    at_s, mean = 0.0, sum(map(sum, CALLS.values())) / 2 / len(CALLS)
    while (at_s := at_s + rng.expovariate(RUN_SHARE * per_s / mean)) < seconds:
        agent = rng.choice(tuple(CALLS))
        own = [replace(next(calls), tenant=agent) for _ in range(rng.randint(*CALLS[agent]))]
        tools_s = [rng.expovariate(1 / TOOL_S) for _ in own]
        service_ms = sum(SPEED.service_ms(one.prompt_tokens, one.length) for one in own)
        deadline_ms = rng.choice(PATIENCE) * service_ms + 1000 * sum(tools_s[:-1]) + MARGIN_MS
        runs.append(AgentRun(at_s, agent, own, tools_s, deadline_ms))
    yield from sorted([*runs, *others], key=lambda one: one.at_s)


def measure(
    load: Sequence[AgentRun | SimArrival],
    manner: str,
    fleet: Fleet,
    *,
    seed: int,
    warm_s: float = 15.0,
    use_tool: UseTool = wait_for_tool,
) -> KeptRuns:
    """Simulate one manner under one load; what comes in the first ``warm_s`` is not counted."""
    return run_quietly(
        lambda loop: _measure(
            loop,
            load,
            manner,
            fleet,
            UNBOUNDED | {"DISPATCH__LEARN_RUNS": str(manner == "learnt")},
            random.Random(seed),
            warm_s,
            use_tool,
        )
    )


async def _measure(
    loop: VirtualLoop,
    load: Sequence[AgentRun | SimArrival],
    manner: str,
    fleet: Fleet,
    settings: Mapping[str, str],
    rng: random.Random,
    warm_s: float,
    use_tool: UseTool,
) -> KeptRuns:
    clock = VirtualClock(loop)
    parts, _ = new_orchestrator(fleet, clock, settings, rng)
    parts.lifecycle.start()
    kept = KeptRuns()
    running: set[asyncio.Task[None]] = set()

    async def client(one: AgentRun | SimArrival) -> None:
        counts = one.at_s >= warm_s
        if isinstance(one, SimArrival):
            met = await _call(parts.orchestrator, clock, one, one.deadline_ms)
            kept.others += counts
            kept.others_kept += counts and met
            return
        ends_at, done, count = clock.now() + one.deadline_ms / 1000, 0, len(one.calls)
        is_whole = True
        kept.runs += counts  # now: it may still wait for a tool when the simulation ends
        for call, tool_s in zip(one.calls, one.tools_s, strict=True):
            left_ms, calls_left = 1000 * (ends_at - clock.now()), count - 1 - done
            budget_ms = {
                "split": min(left_ms, one.deadline_ms / count),
                "rest": left_ms / (1 + calls_left),
            }.get(manner, left_ms)
            said: dict[str, Any] = {}
            if manner == "learnt":
                said = {"session_id": f"{one.agent} {one.at_s}"}
            elif manner == "calls":
                said = {"calls_left": calls_left}
            if not await _call(parts.orchestrator, clock, call, budget_ms, **said):
                break
            done += 1
            if calls_left:
                left_s = ends_at - clock.now()
                is_whole = await use_tool(tool_s, left_s, calls_left) and is_whole
        kept.runs_kept += counts and done == count
        kept.runs_whole += counts and done == count and is_whole
        kept.wasted_calls += done if counts and done < count else 0

    def spawn(one: AgentRun | SimArrival) -> None:
        task = asyncio.ensure_future(client(one))
        running.add(task)
        task.add_done_callback(running.discard)

    for one in load:
        loop.call_at(one.at_s, spawn, one)
    await asyncio.sleep(load[-1].at_s + _LINGER_S - clock.now())
    await parts.lifecycle.drain(0.0)
    await parts.lifecycle.close()
    for task in running:
        task.cancel()
    return kept


async def _call(
    orchestrator: Orchestrator,
    clock: VirtualClock,
    arrival: SimArrival,
    budget_ms: float,
    **said: Any,
) -> bool:
    """Make one call, of which its client says so much; returns whether its answer came in time."""
    job, prompt = new_job(arrival, clock.now(), budget_ms)
    listener = _EndListener()
    try:
        await orchestrator.submit(replace(job, **said), prompt, [listener])
    except TidegateError:
        return False
    await listener.is_over.wait()
    return listener.met


class _EndListener:
    """Waits for a task's end."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.met = False

    def started(self, task: Task) -> None:
        """Ignore the start."""

    def tokens(self, task: Task, delta: Delta) -> None:
        """Ignore the tokens."""

    def ended(self, task: Task) -> None:
        assert task.ending is not None
        self.met = task.ending.outcome is Outcome.MET
        self.is_over.set()


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=75.0,
        help="of load per cell, the first 15 of which do not count",
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.9, 1.2, 1.6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--manners", nargs="+", choices=MANNERS, default=list(MANNERS))
    args = parser.parse_args(argv)
    recording = begin(parser, args, "perf.sim.chains", *argv)
    results: list[BenchResult] = []
    capacity = capacity_per_s(SCENARIO, FLEET, 1)
    print(f"{'load':>5} {'said':8} {'runs kept':>16} {'others kept':>16} {'calls wasted':>13}")
    for load in args.loads:
        with result(results, f"chains-{load:g}x", f"runs at {load:g} times the capacity") as found:
            for manner in args.manners:
                cells = [
                    measure(
                        list(draw_load(load * capacity, args.seconds, seed)),
                        manner,
                        FLEET,
                        seed=seed,
                    )
                    for seed in range(args.seeds)
                ]
                found += kept_figures(f"{load:g}x.{manner}", manner, cells)
                print(
                    f"{load:5g} {manner:8} {_shares([one.run_share for one in cells])}"
                    f" {_shares([one.other_share for one in cells])}"
                    f" {sum(one.wasted_calls for one in cells):13}"
                    f"   ({sum(one.runs_kept for one in cells)} of"
                    f" {sum(one.runs for one in cells)} runs)",
                    flush=True,
                )
    recording.save(recording.bundle(results))
    return 1 if any(one.failed for one in results) else 0


def kept_figures(above: str, what: str, cells: Sequence[KeptRuns]) -> list[Figure]:
    """Shares of what was kept, a sample for each seed; keys begin with ``above``."""
    return [
        Figure.of(f"{above}.{key}", f"{what}: {label}", "", shares, better="higher")
        for key, label, shares in (
            ("runs", "runs kept", [one.run_share for one in cells]),
            ("whole", "runs kept whole", [one.whole_share for one in cells]),
            ("others", "other requests kept", [one.other_share for one in cells]),
        )
    ]


def _shares(shares: Sequence[float]) -> str:
    """Median share in percent, with the least and the greatest in brackets."""
    ordered = sorted(100 * share for share in shares)
    return f"{ordered[len(ordered) // 2]:5.1f} ({ordered[0]:.0f}…{ordered[-1]:.0f})".rjust(16)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
