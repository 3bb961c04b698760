"""Long prompts are encoded here, on threads: a step at a time, the earliest deadline first.

A step is a slice of a prompt, some ten milliseconds of work, so that a prompt of megabytes delays
nobody who has less time. A tokenizer whose texts cannot be cut makes *long* steps; these never
take the last thread. What waits is bounded in bytes, and is dropped once its deadline has passed.
"""

import asyncio
import heapq
import time
from collections.abc import Generator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from orchestrator.clock import Clock
from orchestrator.errors import DeadlineExceeded, QueueFull

T = TypeVar("T")

Steps = Generator[bool, None, T]
"""Work in steps that run on threads, one after the other. Each yields whether the next is long."""

SMALL_BYTES = 64 * 2**10
"""A last eighth of the bytes is for prompts up to this: one of megabytes shuts nobody out."""

_FIRST_S_PER_BYTE = 1e-6


@dataclass(eq=False, slots=True)
class _Job:
    steps: Steps[Any]
    size: int
    done: asyncio.Future[Any]
    is_long: bool = False
    is_running: bool = False
    took_s: float = 0.0

    def step(self) -> tuple[bool, Any]:
        """Whether this was the last one, and its result or whether the next is long."""
        began = time.perf_counter()
        try:
            return False, next(self.steps)
        except StopIteration as end:
            return True, end.value
        finally:
            self.took_s += time.perf_counter() - began


@dataclass(slots=True)
class EncodingStage:
    """Shares ``threads`` of ``executor``. At most ``max_bytes`` wait or are worked on."""

    executor: Executor
    threads: int
    max_bytes: int
    clock: Clock
    held_bytes: int = field(default=0, init=False)
    _waiting: list[tuple[float, int, _Job]] = field(default_factory=list, init=False)
    _running: int = field(default=0, init=False)
    _running_long: int = field(default=0, init=False)
    _numbers: "count[int]" = field(default_factory=count, init=False)
    _s_per_byte: float = field(default=_FIRST_S_PER_BYTE, init=False)

    async def run(self, steps: Steps[T], size: int, due_at: float, part: str = "") -> T:
        """What ``steps`` return. ``size`` is in bytes, ``due_at`` on the clock; ``part`` is what
        of the answer is due then, empty for the whole.

        Raises what they raise, ``QueueFull``, or ``DeadlineExceeded`` once ``due_at`` has passed.
        """
        most = self.max_bytes if size <= SMALL_BYTES else self.max_bytes * 7 // 8
        if self.held_bytes and self.held_bytes + size > most:
            wait_s = self.held_bytes * self._s_per_byte / self.threads
            raise QueueFull(
                f"prompts of {self.held_bytes} bytes wait to become tokens already; "
                "try again shortly, or send token ids",
                retry_after_ms=1000 * wait_s,
            )
        job = _Job(steps, size, asyncio.get_running_loop().create_future())
        self.held_bytes += size
        job.done.add_done_callback(lambda _: self._left(job))
        self._wait(job, due_at)
        timer = self.clock.call_at(due_at, partial(self._time_out, job.done, due_at, part))
        try:
            result: T = await job.done
            return result
        finally:
            timer.cancel()

    def _wait(self, job: _Job, due_at: float) -> None:
        heapq.heappush(self._waiting, (due_at, next(self._numbers), job))
        self._start()

    def _start(self) -> None:
        """Put free threads to work."""
        put_off = []
        while self._waiting and self._running < self.threads:
            entry = heapq.heappop(self._waiting)
            due_at, _, job = entry
            if job.done.done():  # nobody waits for it any more
                continue
            if job.is_long and self._running_long >= max(1, self.threads - 1):
                put_off.append(entry)
            else:
                job.is_running = True
                self._running += 1
                self._running_long += job.is_long
                step = asyncio.get_running_loop().run_in_executor(self.executor, job.step)
                step.add_done_callback(partial(self._stepped, job, due_at, job.is_long))
        for entry in put_off:
            heapq.heappush(self._waiting, entry)

    def _stepped(
        self, job: _Job, due_at: float, was_long: bool, step: "asyncio.Future[tuple[bool, Any]]"
    ) -> None:
        job.is_running = False
        self._running -= 1
        self._running_long -= was_long
        if step.cancelled():  # the service is going down
            job.done.cancel()
        elif (error := step.exception()) is not None:
            if not job.done.done():
                job.done.set_exception(error)
        else:
            is_over, result = step.result()
            if not is_over and not job.done.done():
                job.is_long = result
                self._wait(job, due_at)
                return
            if is_over:
                self._s_per_byte += 0.1 * (job.took_s / max(1, job.size) - self._s_per_byte)
            if not job.done.done():
                job.done.set_result(result)
        self._left(job)
        self._start()

    def _left(self, job: _Job) -> None:
        """Nobody waits for it, or it is over: what it held is free once no step runs."""
        if not job.is_running and job.size:
            job.steps.close()
            self.held_bytes -= job.size
            job.size = 0

    def _time_out(self, done: "asyncio.Future[Any]", due_at: float, part: str) -> None:
        if not done.done():
            what = "the prompt was encoded; send less, or token ids"
            late_s = self.clock.now() - due_at
            done.set_exception(DeadlineExceeded.before(what, late_s, part))
