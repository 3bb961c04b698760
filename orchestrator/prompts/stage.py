"""Encodes long prompts on threads, one step at a time. It alternates between tenants and takes each
tenant's prompts in the order of their deadlines.

A step is a slice of a prompt and takes about ten milliseconds, so that a prompt of megabytes does
not delay prompts with less time. If a tokenizer cannot cut texts, its steps are *long*; long steps
never take the last thread. Waiting prompts are bounded in bytes and dropped after their deadlines.
One tenant may hold at most three times as many bytes as are free.
"""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from orchestrator.clock import Clock
from orchestrator.errors import DeadlineExceeded, QueueFull
from orchestrator.fair_share import FairShares, is_over_share

T = TypeVar("T")

Steps = Generator[bool, None, T]
"""Work in steps that run on threads, in sequence. Each step yields whether the next is long."""

SMALL_BYTES = 64 * 2**10
"""Largest prompt that may use the last eighth, so that large prompts cannot block small ones."""

_FIRST_S_PER_BYTE = 1e-6


@dataclass(eq=False, slots=True)
class _Job:
    steps: Steps[Any]
    size: int
    tenant: str
    due_at: float
    done: asyncio.Future[Any]
    is_long: bool = False
    is_running: bool = False
    took_s: float = 0.0
    charged_s: float = 0.0
    """The part of ``took_s`` that was charged to the tenant."""

    def step(self) -> tuple[bool, Any]:
        """Run one step. Returns whether all are done, and the result or if the next is long."""
        began = time.perf_counter()
        try:
            return False, next(self.steps)
        except StopIteration as end:
            return True, end.value
        finally:
            self.took_s += time.perf_counter() - began


@dataclass(slots=True)
class EncodingStage:
    """Shares ``threads`` of ``executor``. Holds at most ``max_bytes`` of prompts."""

    executor: Executor
    threads: int
    max_bytes: int
    clock: Clock
    held_bytes: int = field(default=0, init=False)
    _held: Counter[str] = field(default_factory=Counter, init=False)
    """Bytes held, by tenant."""
    _waiting: dict[str, list[tuple[float, int, _Job]]] = field(default_factory=dict, init=False)
    _shares: FairShares = field(default_factory=lambda: FairShares(lag_jobs=0.0), init=False)
    _running: int = field(default=0, init=False)
    _running_long: int = field(default=0, init=False)
    _numbers: "count[int]" = field(default_factory=count, init=False)
    _s_per_byte: float = field(default=_FIRST_S_PER_BYTE, init=False)

    async def run(
        self, steps: Steps[T], size: int, due_at: float, part: str = "", tenant: str = ""
    ) -> T:
        """Run ``steps`` and return their result. ``size`` is in bytes. ``due_at`` is the deadline,
        by the clock, of ``part`` of the answer (empty: the whole). Raises the steps' errors,
        ``QueueFull`` or ``DeadlineExceeded``."""
        self._require_room(size, tenant)
        done = asyncio.get_running_loop().create_future()
        job = _Job(steps, size, tenant, due_at, done)
        self.held_bytes += size
        self._held[tenant] += size
        job.done.add_done_callback(lambda _: self._left(job))
        self._wait(job)
        self._start()
        timer = self.clock.call_at(due_at, partial(self._time_out, job.done, due_at, part))
        try:
            result: T = await job.done
            return result
        finally:
            timer.cancel()

    def _require_room(self, size: int, tenant: str) -> None:
        most = self.max_bytes if size <= SMALL_BYTES else self.max_bytes * 7 // 8
        own = self._held[tenant]
        is_over = is_over_share(own, size, self.max_bytes - self.held_bytes)
        if self.held_bytes and (self.held_bytes + size > most or is_over):
            wait_s = self.held_bytes * self._s_per_byte / self.threads
            whose, held = (" of this tenant", own) if is_over else ("", self.held_bytes)
            raise QueueFull(
                f"prompts{whose} of {held} bytes are already waiting for the tokenizer; "
                "try again shortly, or send token ids",
                retry_after_ms=1000 * wait_s,
            )

    def _wait(self, job: _Job) -> None:
        self._shares.joined(job.tenant)
        waiting = self._waiting.setdefault(job.tenant, [])
        heapq.heappush(waiting, (job.due_at, next(self._numbers), job))

    def _start(self) -> None:
        put_off = []
        while self._waiting and self._running < self.threads:
            job = self._next()
            if job.done.done():  # its caller is gone
                continue
            if job.is_long and self._running_long >= max(1, self.threads - 1):
                put_off.append(job)
            else:
                job.is_running = True
                self._running += 1
                self._running_long += job.is_long
                step = asyncio.get_running_loop().run_in_executor(self.executor, job.step)
                step.add_done_callback(partial(self._stepped, job, job.is_long))
        for job in put_off:
            self._wait(job)

    def _next(self) -> _Job:
        tenant = self._shares.next_of(list(self._waiting))
        waiting = self._waiting[tenant]
        _, _, job = heapq.heappop(waiting)
        if not waiting:
            del self._waiting[tenant]
        return job

    def _stepped(self, job: _Job, was_long: bool, step: "asyncio.Future[tuple[bool, Any]]") -> None:
        job.is_running = False
        self._shares.served(job.tenant, 1000 * (job.took_s - job.charged_s))
        job.charged_s = job.took_s
        self._running -= 1
        self._running_long -= was_long
        if step.cancelled():  # the service is shutting down
            job.done.cancel()
        elif (error := step.exception()) is not None:
            if not job.done.done():
                job.done.set_exception(error)
        else:
            is_over, result = step.result()
            if not is_over and not job.done.done():
                job.is_long = result
                self._wait(job)
                self._start()
                return
            if is_over:
                self._s_per_byte += 0.1 * (job.took_s / max(1, job.size) - self._s_per_byte)
            if not job.done.done():
                job.done.set_result(result)
        self._left(job)
        self._start()

    def _left(self, job: _Job) -> None:
        """Free a job's resources. None of its steps may be running."""
        if not job.is_running and job.size:
            job.steps.close()
            self.held_bytes -= job.size
            self._held[job.tenant] -= job.size
            if not self._held[job.tenant]:
                del self._held[job.tenant]
            job.size = 0

    def _time_out(self, done: "asyncio.Future[Any]", due_at: float, part: str) -> None:
        if not done.done():
            what = "the prompt was encoded; send less, or token ids"
            late_s = self.clock.now() - due_at
            done.set_exception(DeadlineExceeded.before(what, late_s, part))
