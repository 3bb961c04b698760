"""Pauses jobs: takes them out of the batch, and keeps their KV.

Pauses and resumes take effect between two steps, and the latest counts: a pause that is taken back
before it took effect leaves no trace.
"""

from collections.abc import Collection

from worker.core import Event, JobPaused, JobResumed
from worker.scheduler.order import least_slack_first
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler


class Pauses:
    """Makes the scheduler follow ``pause_requested``. On the engine's thread, except ``ask``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.asked = False
        """Whether a flag has changed, or could not be followed yet."""

    def ask(self) -> None:
        """Have the flags checked before the next step. For any thread."""
        self.asked = True

    def settle(self, in_flight: Collection[Request]) -> list[Event]:
        """Pause and resume as the flags say. A row of those ``in_flight`` has yet to be read."""
        if not self.asked:
            return []
        # Before the flags are read: what changes from here on is seen next time.
        self.asked = False
        events: list[Event] = []
        for request in list(self._scheduler.running):
            self._pause(request, in_flight, events)
        for request in self._scheduler.waiting:
            self._hold(request, events)
        # Requests that pause have left their slots by now.
        for request in least_slack_first(self._scheduler.paused, self._scheduler.step_time):
            if request.job.pause_requested:
                continue
            if self._scheduler.resume(request):
                events.append(JobResumed(request.job))
            else:
                self.asked = True
        return events

    def _pause(self, request: Request, in_flight: Collection[Request], events: list[Event]) -> None:
        request.pausing = False
        if not self._may_pause(request):
            return
        if request in in_flight:
            request.pausing = True
            self.asked = True
            return
        self._scheduler.pause(request)
        events.append(JobPaused(request.job))

    def _hold(self, request: Request, events: list[Event]) -> None:
        if request.held_back:
            if not request.job.pause_requested:
                request.held_back = False
                self._scheduler.unblock()
                events.append(JobResumed(request.job))
        elif self._may_pause(request):
            request.held_back = True
            request.pauses += 1
            events.append(JobPaused(request.job))

    def _may_pause(self, request: Request) -> bool:
        return (
            request.job.pause_requested
            and not request.leaving
            and request.pauses < self._scheduler.config.most_pauses(request.generated)
        )
