"""Runs of several calls under one deadline, and what their clients may say of it.

An agent makes some calls, one after the other, with a tool's time between them, and its user waits
for the last. Between agents come requests of other kinds (``run_loads``). A run is kept when its
last answer is there in time; one whose call failed is over. The same runs at the same times, with
each manner of ours:

- ``nothing``   every call states the run's deadline, and no more
- ``learnt``    every call states the run's deadline and its session; the service learns how many
  calls are usually to come
- ``split``     every call has an equal share of it to itself
- ``rest``      every call has an equal share of what is left of it
- ``calls``     every call states the run's deadline, and how many calls are still to come

and before others' schedulers (``rivals``), where every call states the run's deadline and its
client hangs up then: ``fifo``, ``jitserve``, and ``jitserve-stages`` with that paper's rule for
requests of several stages.

    python -m perf.sim.chains [--runs short long] [--loads 0.6 0.9 1.2 1.6] [--seeds 3] [--json
                              PATH]
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import TidegateError
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_parser, result
from perf.sim.__main__ import UNBOUNDED
from perf.sim.arrivals import SimArrival
from perf.sim.replay.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.rivals.fleet import EngineFigures, Job, Rival, RivalFleet
from perf.sim.rivals.policies import Fifo, JitServe, JitServeStages
from perf.sim.run_loads import LOADS, AgentRun, RunLoad
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from protocol import Delta, Outcome

MANNERS = ("nothing", "learnt", "split", "rest", "calls")
RIVALS: Mapping[str, Callable[[EngineFigures], Rival]] = {
    "fifo": Fifo,
    "jitserve": JitServe,
    "jitserve-stages": JitServeStages,
}
AIM = 0.95
"""Share (0 to 1) that ``learnt`` is to keep of the runs that ``calls`` keeps."""
_LINGER_S = 1.0

UseTool = Callable[[float, float, int], Awaitable[bool]]
"""What an agent does between two calls, by how many seconds its tool takes, how many are left of
the run, and how many calls are to come; whether it has the tool's result."""

Load = Sequence[AgentRun | SimArrival]


async def wait_for_tool(tool_s: float, left_s: float, calls_left: int) -> bool:
    """Wait for as long as the tool takes."""
    await asyncio.sleep(tool_s)
    return True


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

    def add(self, run: AgentRun, done: int, *, is_whole: bool = True) -> None:
        """Count a run that is over, of whose calls ``done`` were met."""
        is_kept = done == len(run.calls)
        self.runs_kept += is_kept
        self.runs_whole += is_kept and is_whole
        self.wasted_calls += 0 if is_kept else done


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────


def measure(
    load: Load,
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
    load: Load,
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
        for call, tool_s in zip(one.asked(), one.tools_s, strict=True):
            left_ms, calls_left = 1000 * (ends_at - clock.now()), count - 1 - done
            budget_ms = {
                "split": min(left_ms, one.deadline_ms / count),
                "rest": left_ms / (1 + calls_left),
            }.get(manner, left_ms)
            said: dict[str, Any] = {}
            if manner == "learnt":
                said = {"session_id": one.name}
            elif manner == "calls":
                said = {"calls_left": calls_left}
            if not await _call(parts.orchestrator, clock, call, budget_ms, **said):
                break
            done += 1
            if calls_left:
                left_s = ends_at - clock.now()
                is_whole = await use_tool(tool_s, left_s, calls_left) and is_whole
        if counts:
            kept.add(one, done, is_whole=is_whole)

    def spawn(one: AgentRun | SimArrival) -> None:
        task = asyncio.ensure_future(client(one))
        running.add(task)
        task.add_done_callback(running.discard)

    for one in load:
        loop.call_at(one.at_s, spawn, one)
    last_due = max(one.at_s + one.deadline_ms / 1000 for one in load)
    await asyncio.sleep(last_due + _LINGER_S - clock.now())
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


# ── the rivals ───────────────────────────────────────────────────────────────────────────────────


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
            if isinstance(one, SimArrival):
                yield one
            else:
                yield self._next(one, one.at_s)

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


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--runs", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument(
        "--seconds", type=float, help="of load per cell that count; by default what its runs have"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.9, 1.2, 1.6])
    parser.add_argument("--seeds", type=int, default=3)
    names = [*MANNERS, *RIVALS]
    parser.add_argument("--manners", nargs="+", choices=names, default=names)
    args = parser.parse_args(argv)
    recording = begin(parser, args, "perf.sim.chains", *argv, seed=0)
    results: list[BenchResult] = []
    print(f"{'runs':5} {'load':>5} {'said':15} {'runs kept':>16} {'others kept':>16} {'wasted':>7}")
    for of in (LOADS[name] for name in args.runs):
        for load in args.loads:
            what = f"{of.name} runs at {load:g} times the capacity"
            with result(results, f"chains-{of.name}-{load:g}x", what) as found:
                found += measure_all(of, load, args.manners, args.seconds, args.seeds)
    recording.save(recording.bundle(results))
    return 1 if any(one.failed for one in results) else 0


def measure_all(
    of: RunLoad, load: float, manners: Sequence[str], seconds: float | None, seeds: int
) -> list[Figure]:
    """Figures of every manner at one load; prints a row for each."""
    rates, above = of.rates(load), f"{of.name}.{load:g}x"
    shares: dict[str, list[float]] = {}
    found: list[Figure] = []
    for manner in manners:
        cells = []
        for seed in range(seeds):
            drawn = of.draw(rates, of.warm_s + (seconds or of.seconds), seed)
            if manner in RIVALS:
                cells.append(measure_rival(drawn, manner, of, seed=seed, warm_s=of.warm_s))
            else:
                cells.append(measure(drawn, manner, of.fleet, seed=seed, warm_s=of.warm_s))
        shares[manner] = [one.run_share for one in cells]
        found += kept_figures(f"{above}.{manner}", manner, cells)
        print(f"{of.name:5} {load:5g} {manner:15} {_row(cells)}", flush=True)
    if {"learnt", "calls"} <= set(shares):
        pairs = zip(shares["learnt"], shares["calls"], strict=True)
        ratios = [learnt / known for learnt, known in pairs if known]
        label = f"runs kept, learnt ÷ calls known (aim: {AIM:g})"
        found.append(Figure.of(f"{above}.ratio", label, "", ratios, better="higher"))
    return found


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


def _row(cells: Sequence[KeptRuns]) -> str:
    kept, runs = sum(one.runs_kept for one in cells), sum(one.runs for one in cells)
    return (
        f"{_shares([one.run_share for one in cells])} {_shares([one.other_share for one in cells])}"
        f" {sum(one.wasted_calls for one in cells):7}   ({kept} of {runs} runs)"
    )


def _shares(shares: Sequence[float]) -> str:
    """Median share in percent, with the least and the greatest in brackets."""
    ordered = sorted(100 * share for share in shares)
    return f"{ordered[len(ordered) // 2]:5.1f} ({ordered[0]:.0f}…{ordered[-1]:.0f})".rjust(16)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
