"""Checks every request in every step: deadline and abort (DL-3, DL-4), and pauses.

Pauses and resumes take effect between two steps, and the latest one counts: a pause that is
withdrawn before it takes effect has no effect.
"""

from collections.abc import Callable, Sequence

from worker.core import Clock, Event, JobPaused, JobResumed
from worker.engine.backend import Backend
from worker.scheduler.end_reason import (
    ABORTED,
    CANNOT_FINISH,
    CUT_SHORT,
    DEADLINE_PASSED,
    EndReason,
)
from worker.scheduler.order import least_slack_first
from worker.scheduler.request import Request
from worker.scheduler.step_time import BOUND_STEPS, StepTime

_SAMPLE_EVERY = 32
_SMOOTHING = 1 / 8
_EARLY_FADES = 1 / 256


class ExpiryCheck:
    """Finds requests that must stop. A check is a flag test and a float comparison."""

    def __init__(self, clock: Clock, step_time: StepTime, steps_in_flight: int = 0) -> None:
        """``steps_in_flight``: steps launched but not yet read at the time of each check."""
        self._steps_in_flight = steps_in_flight
        self._clock = clock
        self._step_time = step_time
        self._checks = 0
        self._early_s = 0.0
        """How early jobs end cleanly before their deadline, in seconds, the largest recent value:
        an arriving prompt makes the next step slow again."""
        self.check_us = 0.0
        """Cost of a check per request in µs, a moving average of samples (DL-13)."""

    def expired(
        self, running: Sequence[Request], now: float, prompt_tokens: Callable[[], int]
    ) -> list[Request]:
        """Running requests that must stop before the next step.

        That step may carry up to ``prompt_tokens()`` prompt tokens; called only if needed.
        """
        self._checks += 1
        if not running or self._checks % _SAMPLE_EVERY != 1:
            return self._expired(running, now, prompt_tokens)
        started = self._clock()
        expired = self._expired(running, now, prompt_tokens)
        cost_us = (self._clock() - started) * 1e6 / len(running)
        self.check_us += (cost_us - self.check_us) * (_SMOOTHING if self.check_us else 1.0)
        return expired

    def _expired(
        self, running: Sequence[Request], now: float, prompt_tokens: Callable[[], int]
    ) -> list[Request]:
        last_call = None
        token_s = self._step_time.least_token_s
        # A step in flight must be read before a request can end; its tokens already count.
        spared = BOUND_STEPS + self._steps_in_flight
        expired = []
        for request in running:
            job = request.job
            if request.ends_cleanly:
                if last_call is None:
                    slow_s = self._step_time.slow_step_s(prompt_tokens())
                    early_s = slow_s * (1 + self._steps_in_flight)
                    last_call = now + early_s
                    self._early_s = max(early_s, self._early_s * (1 - _EARLY_FADES))
                if job.constraint is not None:
                    job.constraint.is_cut_early(self._early_s)
                ready_by = last_call
            elif request.least_tokens > spared:
                ready_by = now + (request.least_tokens - spared) * token_s
            else:
                ready_by = now
            is_due = ready_by >= job.deadline or job.abort is not None
            if is_due and not _goes_on(request, now):
                expired.append(request)
        return expired

    def unfinishable(self, waiting: Sequence[Request], now: float) -> list[Request]:
        """Waiting requests that were aborted, or whose certain work no longer fits (DL-3)."""
        token_s = self._step_time.least_token_s
        unfinishable = []
        for request in waiting:
            job = request.job
            certain = request.least_tokens - BOUND_STEPS
            misses = certain > 0 and now + certain * token_s >= job.deadline
            if (misses or job.abort is not None) and not _goes_on(request, now):
                unfinishable.append(request)
        return unfinishable

    @staticmethod
    def end_reason(request: Request, now: float) -> EndReason:
        """Why an expired request must stop. An abort outranks the deadline."""
        cause = request.job.abort
        if cause is not None:
            return ABORTED[cause]
        if request.ends_cleanly:
            return CUT_SHORT
        return DEADLINE_PASSED if now >= request.job.deadline else CANNOT_FINISH


def _goes_on(request: Request, now: float) -> bool:
    """Whether a request that is certain to miss its deadline continues as a test (DL-17)."""
    job = request.job
    if not job.keeps_on or job.abort is not None or request.ends_cleanly or now >= job.deadline:
        return False
    request.spared = True
    request.least_tokens = 0
    return True


class Pauses:
    """Makes a backend follow ``pause_requested``. On the engine's thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._roster = backend.roster
        self.asked = False
        """Whether a flag has changed, which any thread may say, or has not taken effect yet."""

    def settle(self) -> list[Event]:
        """Pause and resume as the flags say."""
        if not self.asked:
            return []
        # Cleared before the flags are read: the next call sees later changes.
        self.asked = False
        events: list[Event] = []
        for request in list(self._roster.running):
            self._pause(request, events)
        for request in self._roster.waiting:
            self._hold(request, events)
        # Paused requests have left their slots by now.
        for request in least_slack_first(self._roster.paused, self._roster.step_time):
            if request.job.pause_requested:
                continue
            if self._backend.resume(request):
                events.append(JobResumed(request.job))
            else:
                self.asked = True
        return events

    def _pause(self, request: Request, events: list[Event]) -> None:
        was_pausing, request.pausing = request.pausing, False
        if not self._may_pause(request):
            if was_pausing:
                self._backend.unpause(request)
        elif self._backend.pause(request):
            request.revision += 1
            events.append(JobPaused(request.job))
        else:
            request.pausing = self.asked = True

    def _hold(self, request: Request, events: list[Event]) -> None:
        if request.held_back:
            if not request.job.pause_requested:
                request.held_back = False
                self._roster.unblock()
                events.append(JobResumed(request.job))
        elif self._may_pause(request):
            request.held_back = True
            events.append(JobPaused(request.job))

    def _may_pause(self, request: Request) -> bool:
        return request.job.pause_requested and not request.leaving and self._backend.can_pause
