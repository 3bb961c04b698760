"""Conversations with and without their KV kept between two turns, beside others' requests.

Agents talk, each turn going on with all that was said, with a tool's time between two turns;
others' requests, which have nothing in common, use up the pool meanwhile. The same load with and
without ``idle_keep_s``: how soon an agent's next answer begins, and whether anybody is late for it.

    python -m perf.sim.kept_sessions [--seconds 60] [--loads 0.3 0.6 0.9] [--seeds 3]
"""

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.errors import TidegateError
from orchestrator.tasks.task import Task
from perf.report.stats import percentile
from perf.sim.__main__ import FLEET, SPEED, UNBOUNDED, capacity_per_s
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from worker.protocol import Delta, Outcome

AGENTS = 8
NEW_TOKENS, ANSWER_TOKENS = 48, 24
MAX_TOKENS = 700
"""Length of a conversation in tokens after which its agent begins another one."""
TOOL_S = 8.0
PATIENCE, MARGIN_MS = 3.0, 250.0
KEEP_S = 30.0
ONE = replace(FLEET, count=1, spec=replace(FLEET.spec, prefix_cache=True, kv_tokens=8192))
SCENARIO = Scenario(SPEED)
_FIRST_ID = 1000


@dataclass(slots=True)
class KeptTurns:
    """Results of turns that go on with something, and of others' requests."""

    first_ms: list[float] = field(default_factory=list)
    turns: int = 0
    turns_met: int = 0
    others: int = 0
    others_met: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the turns' prompts that were cached."""

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


def measure(others: Sequence[SimArrival], keep_s: float, fleet: Fleet, *, seed: int) -> KeptTurns:
    """Simulate one load, with the agents' KV kept for ``keep_s`` after a turn."""
    return run_quietly(lambda loop: _measure(loop, others, keep_s, fleet, seed))


async def _measure(
    loop: VirtualLoop, others: Sequence[SimArrival], keep_s: float, fleet: Fleet, seed: int
) -> KeptTurns:
    clock = VirtualClock(loop)
    rng = random.Random(seed)
    parts, _ = new_orchestrator(fleet, clock, UNBOUNDED, rng)
    orchestrator = parts.orchestrator
    parts.lifecycle.start()
    kept, end_s = KeptTurns(), others[-1].at_s
    running: set[asyncio.Task[None]] = set()
    ids = itertools.count(_FIRST_ID)

    async def call(arrival: SimArrival, prompt: list[int], session_id: str) -> Task | None:
        job, _ = new_job(arrival, clock.now(), arrival.deadline_ms)
        job = replace(job, session_id=session_id, idle_keep_s=keep_s if session_id else 0.0)
        listener = _EndListener()
        try:
            task = await orchestrator.submit(job, tuple(prompt), [listener])
        except TidegateError:
            return None
        await listener.is_over.wait()
        return task

    async def other(arrival: SimArrival) -> None:
        task = await call(arrival, [next(ids) for _ in range(arrival.prompt_tokens)], "")
        kept.others += 1
        kept.others_met += task is not None and _is_met(task)

    async def agent(number: int) -> None:
        tools = random.Random(1000 * seed + number)
        said: list[int] = []
        session_id = ""
        while clock.now() < end_s:
            await asyncio.sleep(tools.expovariate(1 / TOOL_S))
            if not said or len(said) > MAX_TOKENS:
                said, session_id = [], f"{number}/{clock.now()}"
            prompt = said + [next(ids) for _ in range(NEW_TOKENS)]
            # Patience is that for a turn whose conversation is there: what keeping it promises.
            wanted_ms = PATIENCE * SPEED.service_ms(NEW_TOKENS, ANSWER_TOKENS) + MARGIN_MS
            task = await call(_turn(clock.now(), len(prompt), wanted_ms), prompt, session_id)
            if said:
                kept.turns += 1
                kept.prompt_tokens += len(prompt)
            if task is None or not _is_met(task):
                continue  # asks again, with another question
            if said:
                kept.turns_met += 1
                kept.cached_tokens += task.cached_tokens
                kept.first_ms.append(1000 * (task.marks.first_token - task.marks.received))
            said = [*prompt, *task.record().ids]

    def spawn(arrival: SimArrival) -> None:
        _hold(running, other(arrival))

    for arrival in others:
        loop.call_at(arrival.at_s, spawn, arrival)
    for number in range(AGENTS):
        _hold(running, agent(number))
    await asyncio.sleep(end_s + 5.0)
    await parts.lifecycle.drain(0.0)
    await parts.lifecycle.close()
    for task in running:
        task.cancel()
    return kept


def _hold(running: set[asyncio.Task[None]], coroutine: Coroutine[None, None, None]) -> None:
    task = asyncio.ensure_future(coroutine)
    running.add(task)
    task.add_done_callback(running.discard)


def _turn(at_s: float, prompt_tokens: int, deadline_ms: float) -> SimArrival:
    return replace(
        next(SCENARIO.arrivals(1e6, 1.0, 1)),
        at_s=at_s,
        prompt_tokens=prompt_tokens,
        max_tokens=ANSWER_TOKENS,
        length=ANSWER_TOKENS,
        deadline_ms=deadline_ms,
    )


def _is_met(task: Task) -> bool:
    return task.ending is not None and task.ending.outcome is Outcome.MET


class _EndListener:
    """Waits for a task's end; has the task keep what it says."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    def started(self, task: Task) -> None:
        task.record()

    def tokens(self, task: Task, delta: Delta) -> None:
        """Ignore the tokens: the transcript has them."""

    def ended(self, task: Task) -> None:
        self.is_over.set()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of load per cell")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    capacity = capacity_per_s(SCENARIO, ONE, 1)
    print(
        f"{'others':>6} {'kept':>5} {'first token ms p50, p95':>24} {'cached':>7} turns, others met"
    )
    for load in args.loads:
        for keep_s in (0.0, KEEP_S):
            cells = []
            for seed in range(args.seeds):
                others = list(SCENARIO.arrivals(load * capacity, args.seconds, seed))
                cells.append(measure(others, keep_s, ONE, seed=seed))
            first_ms = [ms for cell in cells for ms in cell.first_ms]
            cached = sum(c.cached_tokens for c in cells) / sum(c.prompt_tokens for c in cells)
            print(
                f"{load:6g} {keep_s:3g} s {percentile(first_ms, 50):13.0f},"
                f" {percentile(first_ms, 95):6.0f} {100 * cached:8.0f} %"
                f" {sum(c.turns_met for c in cells):6} of {sum(c.turns for c in cells)},"
                f" {sum(c.others_met for c in cells):6} of {sum(c.others for c in cells)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
