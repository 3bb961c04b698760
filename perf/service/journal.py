"""Cost of a durable task: on the disk, in CPU, and for the client that waits for its 202 (OR-5).

The journal by itself, as fast as it takes submissions of 200-token prompts and their ends; then
submissions of a few tokens each over HTTP, durable and plain ones in turns, so that both kinds meet
the same machine, and before each round how long the disk alone takes to have a page (``fdatasync``,
which is what a commit waits for); then what the batches of tokens of 64 running tasks take. Tasks
that are not durable run none of this: their tokens cost nothing.

Over HTTP 200 come in a second, or fewer where clients, orchestrator and worker together are too
much for the machine at that rate: what is added then would be the queue's, and not the journal's.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from orchestrator.clock import Clock, LoopClock
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.file import JournalConfig, open_journal
from orchestrator.tasks.journal.file_store import FileStore
from orchestrator.tasks.task import Task
from perf import SEED
from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.report.stats import median
from perf.service import submissions
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec
from protocol import FinishReason, Outcome, Sampling

_AT_ONCE = 64
_PROMPT, _ANSWER = 200, 16
_BATCH = 12
"""Tokens that a stream has in 250 ms at 20 ms each."""
_PAGE_BYTES, _SYNCS = 4096, 40


@dataclass(slots=True)
class _Taken:
    per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    loop_us: list[float] = field(default_factory=list)


async def run(context: Context) -> list[Figure]:
    rounds, count, seconds = (3, 1500, 1.5) if context.quick else (5, 6000, 4.0)
    taken, token_us = _Taken(), list[float]()
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="tidegate-journal-") as folder:
            await _submit_all(Path(folder), count, taken if turn else _Taken())
            per_token = await _run_streams(Path(folder) / "streams")
            if turn:
                token_us.append(per_token)
    with tempfile.TemporaryDirectory(prefix="tidegate-journal-") as folder:
        spec = StackSpec(
            "synthetic-paced",
            step_ms=5.0,
            max_running=256,
            queue_size=5000,
            journal_path=str(Path(folder) / "journal.db"),
        )
        stack = await context.stack(spec)
        over_http = await _over_http(stack.port, Path(folder), seconds, rounds)
        await context.aclose()
    plain, durable, fsync = over_http.plain, over_http.durable, over_http.fsync
    added = [b - a for a, b in zip(plain, durable, strict=True)]
    in_turns = f"in turns at {over_http.per_s:g}/s"
    if not over_http.is_carried:
        in_turns += ", too many for this machine now"
    of = Figure.of
    return [
        of(
            "journal.submits_per_s",
            "durable submissions, with their ends",
            "/s",
            taken.per_s,
            better="higher",
        ),
        of("journal.cpu_us", "CPU of one, all threads", "µs", taken.cpu_us),
        of("journal.loop_us", "of that on the event loop's thread", "µs", taken.loop_us),
        of("journal.token_us", "CPU per token of a durable stream, off its way", "µs", token_us),
        of(
            "journal.per_s",
            "submissions over HTTP, all of the below",
            "/s",
            [over_http.per_s],
            better="neither",
        ),
        of("journal.alone_ms", "202 of a plain task, one at a time, p50", "ms", over_http.alone),
        of("journal.plain_ms", f"202 of a plain task, {in_turns}, p50", "ms", plain),
        of("journal.durable_ms", "202 of a durable task, p50", "ms", durable),
        of("journal.added_ms", "difference of these medians", "ms", added),
        of("journal.fsync_ms", "the disk alone: a page on it, p50", "ms", fsync),
    ]


async def _submit_all(folder: Path, count: int, taken: _Taken) -> None:
    """``count`` submissions, 64 at once; each ends as soon as it is on the disk."""
    clock = LoopClock(asyncio.get_running_loop())
    file = await asyncio.to_thread(open_journal, JournalConfig(folder / "journal.db"))
    journal = DurableTasks(FileStore(file), clock)
    journal.start()
    rng = random.Random(SEED)
    left = [_new_task(rng, clock) for _ in range(count)]  # which takes longer than the journal

    async def submit() -> None:
        while left:
            task = left.pop()
            journal.accept(task, "")
            await journal.committed(task)
            _say(task, _ANSWER)
            task.end(Ending(Outcome.MET, FinishReason.LENGTH), clock.now())

    began, cpu, loop_cpu = time.perf_counter(), time.process_time(), time.thread_time()
    await asyncio.gather(*(submit() for _ in range(_AT_ONCE)))
    await journal.close()
    taken.per_s.append(count / (time.perf_counter() - began))
    taken.cpu_us.append(1e6 * (time.process_time() - cpu) / count)
    taken.loop_us.append(1e6 * (time.thread_time() - loop_cpu) / count)


async def _run_streams(folder: Path) -> float:
    """CPU per token of handing the new ones of 64 tasks over and writing them, in µs."""
    clock = LoopClock(asyncio.get_running_loop())
    file = await asyncio.to_thread(open_journal, JournalConfig(folder / "journal.db"))
    journal = DurableTasks(FileStore(file), clock)
    journal.start()
    rng, tokens = random.Random(SEED), 0
    tasks = [_new_task(rng, clock) for _ in range(_AT_ONCE)]
    for task in tasks:
        journal.accept(task, "")
    await asyncio.gather(*(journal.committed(task) for task in tasks))
    cpu = time.process_time()
    for _ in range(20):
        for task in tasks:
            _say(task, _BATCH)
            tokens += _BATCH
        journal.flush()
        await asyncio.sleep(0.005)
    await journal.close()
    return 1e6 * (time.process_time() - cpu) / tokens


def _new_task(rng: random.Random, clock: Clock) -> Task:
    now, unix = clock.now(), clock.unix()
    job = Job(
        api=Api.NATIVE,
        model="",
        sampling=Sampling(max_tokens=_ANSWER),
        max_tokens=_ANSWER,
        deadline=Deadline(now + 60, int(1000 * (unix + 60))),
        correlation_id=f"{rng.getrandbits(128):032x}",
        arrived=now,
        keep=True,
        durable=True,
    )
    task = Task(f"{rng.getrandbits(128):032x}", job)
    task.model = "demo"
    task.token_ids = rng.choices(range(4096), k=_PROMPT)
    task.prompt_tokens = _PROMPT
    task.record()
    return task


def _say(task: Task, tokens: int) -> None:
    transcript = task.record()
    transcript.ids += range(tokens)
    transcript.texts += [" word"] * tokens
    task.completion_tokens += tokens


@dataclass(slots=True)
class OverHttp:
    """Medians of each round, in ms, at ``per_s`` submissions a second."""

    per_s: float
    alone: list[float] = field(default_factory=list)
    """Times of a plain 202 where one is asked for at a time."""
    plain: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    fsync: list[float] = field(default_factory=list)

    @property
    def is_carried(self) -> bool:
        """See ``submissions.Round``; plain ones alone are judged."""
        return submissions.is_carried(self.plain, self.alone)


def _fsync_ms(folder: Path) -> float:
    """Median time in ms that the disk under the journal takes to have one more page of a file."""
    taken = []
    file = os.open(folder / "page", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(_SYNCS):
            os.write(file, os.urandom(_PAGE_BYTES))
            began = time.perf_counter()
            os.fdatasync(file)
            taken.append(1000 * (time.perf_counter() - began))
    finally:
        os.close(file)
    return median(taken)


async def _over_http(port: int, folder: Path, seconds: float, rounds: int) -> OverHttp:
    """Time submissions to their 202, and the disk that the journal is on."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector) as http:

        async def measure(per_s: float) -> OverHttp:
            found = OverHttp(per_s)
            await _round(http, folder, seconds, found)
            if found.is_carried:  # the first one warms up
                found = OverHttp(per_s)
                for _ in range(rounds):
                    await _round(http, folder, seconds, found)
            return found

        return await submissions.at_largest_rate(measure)


async def _round(
    http: aiohttp.ClientSession, folder: Path, seconds: float, found: OverHttp
) -> None:
    def submit(number: int) -> Awaitable[float]:
        return submissions.submit(http, "", is_durable=number % 2 == 1)

    alone = [await submit(0) for _ in range(submissions.ALONE)]
    found.alone.append(median(alone))
    found.fsync.append(await asyncio.to_thread(_fsync_ms, folder))
    taken = await submissions.at_rate(found.per_s, seconds, submit)
    found.plain.append(median(taken[::2]))
    found.durable.append(median(taken[1::2]))


BENCH = Bench("journal", "durable tasks: a disk's share of a submission", run, 150, in_quick=False)
