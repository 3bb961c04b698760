"""Pauses jobs of a third-party engine: takes them out of its batch, to go on later.

Pauses and resumes take effect between two steps, and the latest counts: a pause that is taken back
before it took effect leaves no trace.
"""

from collections.abc import Iterable
from typing import Protocol

from worker.core import Event, JobPaused, JobResumed
from worker.engines.backend import Backend
from worker.scheduler.config import most_pauses
from worker.scheduler.request import Request


class PausingBackend(Backend, Protocol):
    """A backend that can take a job out of its batch and put it back."""

    def pause(self, handle: int) -> bool:
        """Compute no more of a job, and give its memory to others. False where that is not possible
        now: ask again after the next step. ``abort`` ends a paused job, too."""

    def resume(self, handle: int) -> None:
        """Go on with a job after its latest token. There is a slot for it. Does nothing for a job
        that ``pause`` was not called for."""


class BackendPauses:
    """Makes a backend follow ``pause_requested``. On the engine's thread, except ``ask``."""

    def __init__(self, backend: PausingBackend | None) -> None:
        """``backend`` None: nothing is ever paused."""
        self._backend = backend
        self.paused: dict[int, Request] = {}
        """Started jobs that are paused, by handle."""
        self._pausing: set[int] = set()
        """Jobs that the backend could not pause yet, by handle."""
        self.asked = False
        """Whether a flag has changed, or could not be followed yet."""

    @property
    def can_pause(self) -> bool:
        return self._backend is not None

    def ask(self) -> None:
        """Have the flags checked before the next step. Any thread."""
        self.asked = True

    def settle(
        self, running: dict[int, Request], waiting: Iterable[Request], slots: int
    ) -> list[Event]:
        """Pause and resume as the flags say. ``running`` is kept up to date, and holds ``slots``
        jobs at most."""
        if not self.asked or self._backend is None:
            return []
        # Before the flags are read: what changes from here on is seen next time.
        self.asked = False
        events: list[Event] = []
        self._pausing.intersection_update(running)
        for handle, request in list(running.items()):
            if not _may_pause(request):
                if handle in self._pausing:  # taken back meanwhile
                    self._pausing.remove(handle)
                    self._backend.resume(handle)
                continue
            if not self._backend.pause(handle):
                self._pausing.add(handle)
                self.asked = True
                continue
            self._pausing.discard(handle)
            self.paused[handle] = running.pop(handle)
            request.pauses += 1
            events.append(JobPaused(request.job))
        for request in waiting:
            _hold(request, events)
        for handle, request in sorted(self.paused.items(), key=lambda item: item[1].latest_start):
            if request.job.pause_requested:
                continue
            if len(running) >= slots:
                self.asked = True
                break
            running[handle] = self.paused.pop(handle)
            self._backend.resume(handle)
            events.append(JobResumed(request.job))
        return events


def _hold(request: Request, events: list[Event]) -> None:
    """Keep a request that waits from starting, or let it start again."""
    if request.held_back:
        if not request.job.pause_requested:
            request.held_back = False
            events.append(JobResumed(request.job))
    elif _may_pause(request):
        request.held_back = True
        request.pauses += 1
        events.append(JobPaused(request.job))


def _may_pause(request: Request) -> bool:
    return request.job.pause_requested and request.pauses < most_pauses(request.generated)
