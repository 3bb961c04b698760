"""Ends the worker's process if its engine fails or hangs, so that its supervisor starts another.

A dead engine thread cannot be restarted: the state of its device's memory is unknown. A thread that
hangs in a step (a kernel or a driver that never returns) cannot be ended at all. If the process
kept running, the worker would refuse every job or hold it forever, and would look alive.

``FailureWatch`` needs the GIL: native code that never returns and never releases the GIL blocks it
too. ``ProcessGuard`` is a timer of ``faulthandler``, whose thread does not need the GIL.
"""

import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final

from worker.core import Clock, EngineService
from worker.log import service_log
from worker.service.drain import Drainer
from worker.service.emitter import Emitter
from worker.settings import WorkerSettings

LAST_WORDS_S: Final = 0.5
"""Seconds to send the last answers through Triton."""
MAX_S: Final = 5.0
"""Maximum seconds to answer all jobs; a failed engine may be unable to end some of them."""
TIMES_USUAL: Final = 50.0
"""A step counts as hung only after this many times the usual step time."""
TIMES_UNKNOWN: Final = 10.0
"""Until a step is measured, a step counts as hung only after this many times the setting, because a
first step may compile code."""
STEP_TIMEOUT_S: Final = 60.0
"""A step that takes longer than this and longer than 50 times the usual time counts as hung. The
process then ends, so that its supervisor restarts it. Until a step is measured, the limit is ten
times as long."""
STUCK_SHARE: Final = 1 / 6
"""Share of the hang limit after which the worker reports a stuck step to orchestrators."""
STUCK_ON_GPU_S: Final = 1.0
"""The same limit in seconds on a GPU, where no other process delays a step, or ``STUCK_SHARE`` of
``TIMES_USUAL`` times the usual time if that is longer."""
LOOK_S: Final = 0.25
MAX_LOOK_S: Final = 1.0
"""Maximum seconds counted between two checks: in a longer gap, the whole process stood still."""
ENGINE_THREAD: Final = "tidegate-engine"


class StepWatch:
    """Measures how long an engine has been in one step, by polling it. ``timeout_s`` is the limit
    that ``STEP_TIMEOUT_S`` describes."""

    def __init__(self, timeout_s: float, clock: Clock, *, on_gpu: bool = False) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_gpu = on_gpu
        self._began_at: float | None = None
        self._looked_at = clock()
        self._seen_s = 0.0
        self._limit_s = timeout_s
        self._stuck_after_s = STUCK_SHARE * timeout_s

    def look(self, engine: EngineService) -> None:
        """Poll the engine. Call it often: it polls at most every ``LOOK_S`` seconds."""
        now = self._clock()
        passed_s = now - self._looked_at
        if passed_s < LOOK_S:
            return
        self._looked_at = now
        step = engine.step_under_way
        if step is None or step.began_at != self._began_at:
            self._began_at = None if step is None else step.began_at
            self._seen_s = 0.0
            return
        self._seen_s += min(passed_s, MAX_LOOK_S)
        usual = TIMES_USUAL * step.usual_s or TIMES_UNKNOWN * self._timeout_s
        self._limit_s = max(self._timeout_s, usual)
        self._stuck_after_s = STUCK_SHARE * self._limit_s
        if self._on_gpu and step.usual_s:
            of_usual_s = max(STUCK_ON_GPU_S, STUCK_SHARE * usual)
            self._stuck_after_s = min(self._stuck_after_s, of_usual_s)

    @property
    def stuck_s(self) -> float:
        """Seconds that the step has taken, once that is far too long; otherwise 0."""
        return self._seen_s if self._seen_s > self._stuck_after_s else 0.0

    @property
    def has_hung(self) -> bool:
        """Whether the step has run long enough to count as hung."""
        return self._seen_s > self._limit_s


class FailureWatch:
    """Ends the process of a failed engine. ``advance`` runs once per cycle of the emitter, before
    events are applied."""

    def __init__(
        self,
        engine: Callable[[], EngineService],
        emitter: Emitter,
        drainer: Drainer,
        clock: Clock,
        die: Callable[[], None],
        settings: WorkerSettings,
        device_fault: Callable[[], str],
    ) -> None:
        """``engine`` returns the current engine. ``device_fault`` returns why its device is lost
        ("" if it is not). ``die`` ends the process."""
        self._engine = engine
        self._emitter = emitter
        self._drainer = drainer
        self._clock = clock
        self._die = die
        self._device_fault = device_fault
        self._step = StepWatch(STEP_TIMEOUT_S, clock, on_gpu=settings.computes_on_gpu)
        self._what = ""
        self._noticed_at: float | None = None
        self._is_over = False

    def advance(self) -> None:
        """Check whether the engine has failed or hung; if so, drain, then end the process."""
        if self._is_over:
            return
        if self._noticed_at is None:
            self._look()
            return
        left = len(self._emitter.job_replies)
        waited_s = self._clock() - self._noticed_at
        if waited_s >= (MAX_S if left else LAST_WORDS_S):
            self._is_over = True
            service_log.critical(
                "the engine has %s: ending the process, %d jobs unanswered; its supervisor"
                " starts it again",
                self._what,
                left,
            )
            self._die()

    def _look(self) -> None:
        engine = self._engine()
        self._step.look(engine)
        was_stuck, self._emitter.stuck_ms = self._emitter.stuck_ms, 1000 * self._step.stuck_s
        if self._emitter.stuck_ms and not was_stuck:
            self._emitter.announce()  # not with the next heartbeat: work still comes in
        if self._drainer.is_swapping:  # the swap replaces the engine or ends the process
            return
        if engine.has_failed:
            self._what = "failed"
        elif self._step.has_hung:
            service_log.critical("one step takes %.0f s:\n%s", self._step.stuck_s, _stacks())
            self._what = "hung"
        elif fault := self._device_fault():
            service_log.critical("%s", fault)
            self._what = "lost its device"
        else:
            return
        self._noticed_at = self._clock()
        self._drainer.begin(0.0, None)
        if self._what != "failed":
            self._emitter.hand_back_all()


def _stacks() -> str:
    """Stacks of the engine's threads: code lines without values."""
    frames = sys._current_frames()
    return "".join(
        "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread.name == ENGINE_THREAD and thread.ident in frames
    )


STDERR: Final = 2
RENEWALS: Final = 4
"""Timer renewals per ``timeout_s``."""


class ProcessGuard:
    """Ends the process (status 1) unless ``advance`` is called at least every ``timeout_s``.

    A process has only one such timer; in tests, the test runner uses it.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """With ``timeout_s`` 0 the process never ends. A process that was suspended for that long
        also ends when it resumes: its jobs have moved by then."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._due_at = clock()

    def advance(self) -> None:
        """Renew the timer if a renewal is due."""
        now = self._clock()
        if self._timeout_s and now >= self._due_at:
            self._due_at = now + self._timeout_s / RENEWALS
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=STDERR)

    def close(self) -> None:
        """Stop the timer: the process may block from now on. Idempotent."""
        self._timeout_s = 0.0
        faulthandler.cancel_dump_traceback_later()
