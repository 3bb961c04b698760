"""Stops a step under way once all of its jobs have been given up: nobody waits for it any more.

While one job of a step is wanted the step goes on, since what it has computed would be lost to that
job; such steps are kept short (``backend``).
"""

import math
import threading
from collections.abc import Callable, Sequence

from worker.core import Clock, Job


class StepAborter:
    """``stop(True)`` ends a step, ``stop(False)`` allows the next. ``clock`` is that of the jobs'
    deadlines. Has a thread of its own, which sleeps but for news and the latest deadline."""

    def __init__(self, stop: Callable[[bool], None], clock: Clock) -> None:
        self._stop = stop
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: Sequence[Job] = ()
        self._sleeps_until = math.inf
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, jobs: Sequence[Job]) -> None:
        """Note that a step of these jobs is about to run."""
        if self._thread is None and not self._closed:
            # Started here, not while loading: a thread inherits its maker's niceness.
            self._thread = threading.Thread(
                target=self._run, name="tidegate-step-watch", daemon=True
            )
            self._thread.start()
        with self._changed:
            self._jobs = jobs
            self._stop(False)
            if _dead_at(jobs) < self._sleeps_until:
                self._changed.notify()

    def end(self) -> None:
        """Note that the step has ended, one way or the other."""
        with self._changed:
            self._jobs = ()
            self._stop(False)

    def look(self) -> None:
        """Have the jobs looked at again, since one may have been given up. Any thread."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                dead_at = _dead_at(self._jobs) if self._jobs else math.inf
                now = self._clock()
                if dead_at <= now:
                    self._stop(True)
                    dead_at = math.inf
                self._sleeps_until = dead_at
                left_s = min(dead_at - now, threading.TIMEOUT_MAX)
                self._changed.wait(left_s)


def _dead_at(jobs: Sequence[Job]) -> float:
    """When the last of the jobs is past its deadline, on the clock; at once if all are aborted."""
    return max((job.deadline for job in jobs if job.abort is None), default=-math.inf)
