"""Pauses jobs: takes them out of the batch, and keeps their KV.

Pauses and resumes take effect between two steps, and the latest counts: a pause that is taken back
before it took effect leaves no trace.
"""

from worker.core import Event, JobPaused, JobResumed
from worker.engine.backend import Backend
from worker.scheduler.order import least_slack_first
from worker.scheduler.request import Request


class Pauses:
    """Makes a backend follow ``pause_requested``. On the engine's thread, except ``ask``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.asked = False
        """Whether a flag has changed, or could not be followed yet."""

    def ask(self) -> None:
        """Have the flags checked before the next step. For any thread."""
        self.asked = True

    def settle(self) -> list[Event]:
        """Pause and resume as the flags say."""
        if not self.asked:
            return []
        # Before the flags are read: what changes from here on is seen next time.
        self.asked = False
        events: list[Event] = []
        for request in list(self._backend.running):
            self._pause(request, events)
        for request in self._backend.waiting:
            self._hold(request, events)
        # Requests that pause have left their slots by now.
        for request in least_slack_first(self._backend.paused, self._backend.step_time):
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
            request.pauses += 1
            events.append(JobPaused(request.job))
        else:
            request.pausing = self.asked = True

    def _hold(self, request: Request, events: list[Event]) -> None:
        if request.held_back:
            if not request.job.pause_requested:
                request.held_back = False
                self._backend.unblock()
                events.append(JobResumed(request.job))
        elif self._may_pause(request):
            request.held_back = True
            request.pauses += 1
            events.append(JobPaused(request.job))

    def _may_pause(self, request: Request) -> bool:
        return (
            request.job.pause_requested
            and not request.leaving
            and request.pauses < self._backend.most_pauses(request)
        )
