"""Runs one stage on its own thread, with turns, timeouts, retries and a CUDA stream (SL-4)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from clips.plan.budgets import ClipStage, StageTimes, backoffs
from clips.render.errors import (
    BehindPace,
    ClipCancelled,
    ClipError,
    OutOfTime,
    StageFailed,
    StageTimeout,
)
from clips.render.memory import media_log
from clips.render.stages.base import Step
from worker.errors import MemoryLimitExceeded, RequestError
from worker.memory import MemoryGuard
from worker.priority import lower_priority

NICE: Final = 10
"""Niceness of threads that render on the CPU, or encode, so that text has priority."""
T = TypeVar("T")
Progress = Callable[[float], None]
"""Called on the stage's thread with the stage's progress, 0 to 1."""


@dataclass(slots=True)
class _Steps:
    """The check that a provider calls in each step; raises the error that ends the stage."""

    stage: ClipStage
    begun: float
    limit_s: float
    deadline_at: float
    memory: MemoryGuard
    said: Progress
    halted: bool = False
    done: float = 0.0

    def __call__(self, done: float) -> None:
        if self.halted:
            raise ClipCancelled(self.stage, "stopped")
        now, timeout_at = time.monotonic(), self.begun + self.limit_s
        if now > self.deadline_at:
            raise OutOfTime(self.stage, "the deadline came", self.deadline_at)
        if now > timeout_at:
            said = f"took longer than {self.limit_s:.1f} s"
            raise StageTimeout(self.stage, said, timeout_at)
        self.memory.check(what=self.stage)
        self.done = done
        self.said(done)

    def halt(self) -> None:
        self.halted = True

    def finish(self) -> None:
        """Report the stage as done, if the provider has not."""
        if self.done < 1.0:
            self.said(1.0)


class StageRunner:
    """Runs a provider of one stage for one clip at a time; other clips wait for their turn."""

    def __init__(
        self,
        stage: ClipStage,
        times: StageTimes,
        memory: MemoryGuard,
        device: torch.device,
        check_device: Callable[[], None] | None = None,
    ) -> None:
        """``check_device`` is called after a failure; it raises ``DeviceLost`` if the device is no
        longer usable."""
        self.stage = stage
        self._times = times
        self._memory = memory
        self._check_device = check_device
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix=f"slot {stage}",
            # On a GPU the thread only launches work, which should not wait for a core.
            initializer=lower_priority,
            initargs=(NICE if device.type == "cpu" else 0,),
        )
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the thread, after the stage that it is running."""
        self._thread.shutdown()

    async def run(
        self, work: Callable[[Step], T], units: float, deadline_at: float, progress: Progress
    ) -> T:
        """Run ``work``, of so many ``units``, on the stage's thread.

        When this raises or is cancelled, the work and everything that it launched have ended, so
        its buffers are free. Raises ``ClipError``, ``MemoryLimitExceeded``, ``RequestError`` for an
        error in the recipe, and ``DeviceLost``.
        """
        async with self.turn(deadline_at):
            return await self.run_in_turn(work, units, deadline_at, progress)

    @asynccontextmanager
    async def turn(self, until: float) -> AsyncIterator[None]:
        """Hold the stage inside this context. Raises ``OutOfTime`` if another clip still holds it
        at ``until``, on ``time.monotonic``."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._turn.acquire()
        except TimeoutError:
            raise OutOfTime(self.stage, "its turn did not come in time") from None
        try:
            yield
        finally:
            self._turn.release()

    async def run_in_turn(
        self, work: Callable[[Step], T], units: float, deadline_at: float, progress: Progress
    ) -> T:
        """Like ``run``, for a caller that already holds the stage (``turn``)."""
        for pause in backoffs(self._times.budget.retries):
            try:
                return await self._try(work, units, deadline_at, progress)
            except StageFailed as error:
                if time.monotonic() + pause + self._times.likely_s(units) > deadline_at:
                    raise
                media_log.warning("%s; again in %.1f s", error, pause)
                await asyncio.sleep(pause)
        return await self._try(work, units, deadline_at, progress)

    async def _try(
        self, work: Callable[[Step], T], units: float, deadline_at: float, progress: Progress
    ) -> T:
        self._memory.check(what=self.stage)
        begun, loop = time.monotonic(), asyncio.get_running_loop()
        limit_s = self._times.timeout_s(units)
        steps = _Steps(self.stage, begun, limit_s, deadline_at, self._memory, progress)
        try:
            with self._times.activity.running():
                running = loop.run_in_executor(self._thread, self._call, work, steps)
                result = await ended(running, steps.halt)
        except (ClipError, MemoryLimitExceeded, RequestError) as error:
            # The spoken share of a text is unknown: a speech's progress is a share of its buffer.
            if (
                isinstance(error, OutOfTime | BehindPace | StageTimeout)
                and self.stage is not ClipStage.SPEECH
            ):
                done = steps.done * units
                self._times.observe(time.monotonic() - begun, done, is_whole=False)
            await self._settle(is_critical=False)
            raise
        except asyncio.CancelledError:
            await self._settle(is_critical=False)
            raise
        except torch.OutOfMemoryError as error:
            await self._settle(is_critical=True)
            raise MemoryLimitExceeded(
                f"{self.stage}: the device has no memory left, or no more below"
                " TIDEGATE_SLOT__MEMORY__HARD_GIB; lower TIDEGATE_SLOT__SIZE or a model's precision"
            ) from error
        except Exception as error:
            await self._settle(is_critical=True)
            raise StageFailed(self.stage, f"{type(error).__name__}: {error}") from error
        self._times.observe(time.monotonic() - begun, units)
        return result

    def _call(self, work: Callable[[Step], T], steps: _Steps) -> T:
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:
            steps(0.0)
            result = work(steps)
            if self._stream is not None:
                self._stream.synchronize()
            steps.finish()
            return result

    async def _settle(self, *, is_critical: bool) -> None:
        """Wait, off the event loop, for the device's queued work on the clip's buffers. Raises
        ``DeviceLost`` if a critical failure has made the device unusable."""
        stream, check_device = self._stream, self._check_device if is_critical else None
        if stream is None and check_device is None:
            return

        def settle() -> None:
            if check_device is not None:
                check_device()
            if stream is not None:
                stream.synchronize()
                if is_critical:
                    torch.cuda.empty_cache()

        await asyncio.get_running_loop().run_in_executor(self._thread, settle)


async def ended(running: "asyncio.Future[T]", halt: Callable[[], object]) -> T:
    """The result of work on a clip's buffers. The work has always ended when this returns or
    raises, since the buffers are lent again. A cancellation calls ``halt`` to stop it soon."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        halt()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # read, so that asyncio does not log it
        raise
