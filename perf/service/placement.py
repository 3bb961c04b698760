"""Cost of placing one task at 100 instances (OR-7): the pure function, and all around it; and at
1,000, alone and as one of many orchestrators.

In this process, without sockets: candidates as the registry makes them, half of them busy, a prompt
of 64 blocks of which every tenth instance holds some.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.clock import Timer
from orchestrator.placement import Candidate, Demand, Placer, PrefixIndex, Requirements, place
from orchestrator.prediction import Load, StepModel
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.task import Task
from perf import SEED
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from protocol import KvReport, Sampling

INSTANCES, MANY, FEW = 100, 1000, 40
_BLOCKS = 64
_NAMES = [i.to_bytes(32, "big") for i in range(_BLOCKS)]
_CALLS = 200


class _Clock:
    def now(self) -> float:
        return time.perf_counter()

    def unix(self) -> float:
        return time.time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        raise NotImplementedError("placement sets no timers")


class _Registry:
    """A registry that does not change."""

    def __init__(self, candidates: Sequence[Candidate], prefixes: PrefixIndex) -> None:
        self.snapshot_version = 1
        self.prefixes = prefixes
        self._candidates = {candidate.name: candidate for candidate in candidates}

    def candidates(self) -> Sequence[Candidate]:
        return list(self._candidates.values())

    def candidate(self, name: str) -> Candidate:
        return self._candidates[name]


async def run(context: Context) -> list[Figure]:
    return await asyncio.to_thread(_measure, 10 if context.quick else 60)


def _measure(samples: int) -> list[Figure]:
    task, of = _task(), Figure.of
    candidates = _candidates(INSTANCES, INSTANCES)
    demand = Demand(Requirements("m", b"v"), 1030, 64)
    cached = {candidates[90].name: 864}
    figures = [
        of(
            "placement.pure_us",
            f"pure placement, {INSTANCES} instances",
            "µs",
            _times(lambda: place(demand, candidates, cached), samples, _CALLS),
        )
    ]
    for key, count, ours, said in (
        ("choose", INSTANCES, INSTANCES, ""),
        ("choose_many", MANY, MANY, f", {MANY} instances"),
        ("choose_fleet", MANY, FEW, f", {FEW} of {MANY} instances for this orchestrator"),
    ):
        placer = _placer(_candidates(count, ours))
        calls = _CALLS * INSTANCES // count
        times = _times(lambda placer=placer: placer.choose(task), samples, calls)  # type: ignore[misc]
        what = f"with feasible set, prefix look-up, affinity{said}"
        figures.append(of(f"placement.{key}_us", what, "µs", times))
    return figures


def _candidates(count: int, ours: int) -> list[Candidate]:
    rng, candidates = random.Random(SEED), []
    for i in range(count):
        model = StepModel(16, 512, rng.uniform(8, 12), 0.3, 0.1)
        jobs = rng.randrange(12)
        step = model.under(Load(jobs, 0, 100, 50 * jobs))
        one = Candidate(f"10.0.0.{i}:8001", "m", b"v", True, 17, jobs, 4096, 900, step)
        candidates.append(replace(one, is_ours=i < ours))
    return candidates


def _placer(candidates: Sequence[Candidate]) -> Placer:
    """Every tenth of the first hundred holds some of the prompt."""
    prefixes = PrefixIndex()
    for i in range(0, INSTANCES, 10):
        prefixes.apply(candidates[i].name, KvReport(_NAMES[: 6 * i // 10], [], full=True))
    placer = Placer(_Registry(candidates, prefixes), _Clock(), lambda task: 64)
    placer.refresh()
    return placer


def _task() -> Task:
    job = Job(
        api=Api.NATIVE,
        model="m",
        sampling=Sampling(max_tokens=128),
        max_tokens=128,
        deadline=Deadline(time.perf_counter() + 60, 0),
        correlation_id="",
        arrived=0.0,
    )
    task = Task("t", job)
    task.model, task.vocabulary = "m", b"v"
    task.prompt_tokens, task.block_tokens, task.prefix_hashes = 1030, 16, _NAMES
    return task


def _times(call: Callable[[], object], samples: int, calls: int) -> list[float]:
    """Microseconds of a call, the mean of ``calls`` for each sample."""
    taken = []
    for turn in range(samples + 1):
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        if turn:  # warm-up
            taken.append((time.perf_counter() - begun) * 1e6 / calls)
    return taken


BENCH = Bench("placement", f"placing one task on one of {INSTANCES} instances", run, limit_s=30)
