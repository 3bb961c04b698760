"""What an engine has around its steps: a thread of its own, flags of jobs, events to the sink."""

import threading
from abc import ABC, abstractmethod

from protocol import AbortCause
from worker.core import Clock, Event, EventSink, Job
from worker.errors import DeviceLost
from worker.log import engine_log


class ThreadedEngine(ABC):
    """Base of an ``EngineService``: ``start`` runs ``step`` on a thread of its own; tests and
    simulators call it themselves. ``clock`` is monotonic seconds."""

    can_pause = True
    """Whether ``pause`` is heeded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._has_failed = False
        self._step_began_at: float | None = None
        """When the engine's thread began its current step, on the clock; None between two steps."""
        self._thread: threading.Thread | None = None
        self._sink: EventSink | None = None

    # ── the surface: any thread ──────────────────────────────────────────────────────────────

    def start(self, sink: EventSink) -> None:
        """Start the engine's thread; ``sink`` is called on it and slows it down by blocking."""
        if self._thread is not None or self._stopped:
            raise RuntimeError("an engine starts once; build another one")
        self.connect(sink)
        self._thread = threading.Thread(target=self._run, name="tidegate-engine", daemon=True)
        self._thread.start()

    def connect(self, sink: EventSink) -> None:
        """Send events that need not wait for a step to ``sink`` at once; ``start`` calls this."""
        self._sink = sink

    def cancel(self, job: Job, cause: AbortCause) -> None:
        """Stop a job within one step. Idempotent; the first cause wins."""
        with self._wake:
            if job.abort is not None:
                return
            job.aborted_at = self._clock()
            job.abort = cause
            self._aborted()

    def pause(self, job: Job) -> None:
        """Pause a job after the step under way; its KV is kept. Idempotent; ignored where jobs
        cannot be paused."""
        self._request_pause(job, True)

    def resume(self, job: Job) -> None:
        """Let a paused job go on, before any that waits to start. Idempotent."""
        self._request_pause(job, False)

    def _request_pause(self, job: Job, wanted: bool) -> None:
        with self._wake:
            if self.can_pause and job.pause_requested != wanted:
                job.pause_requested = wanted
                self._pause_requested()

    @property
    def has_failed(self) -> bool:
        """See ``EngineService``."""
        return self._has_failed

    def stop(self) -> None:
        """Abort all jobs, release everything, end the thread. Idempotent."""
        with self._wake:
            self._stopping = True
            self._notify()
        if self._thread is None:
            self._shut_down()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # ── what an engine adds ──────────────────────────────────────────────────────────────────

    @abstractmethod
    def step(self) -> list[Event]:
        """Do one step; returns the events not yet published during it, in order for each job."""

    @abstractmethod
    def _aborted(self) -> None:
        """Note that a job was aborted, and wake the thread. Called with ``_wake`` held."""

    @abstractmethod
    def _pause_requested(self) -> None:
        """Note that a job is to pause or go on, and wake the thread. Called with ``_wake`` held."""

    @abstractmethod
    def _notify(self) -> None:
        """Wake the engine's thread. Any thread."""

    @abstractmethod
    def _wait_for_work(self) -> bool:
        """Sleep until there is work or news; False when it is time to stop."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End all remaining jobs and release what computes. Idempotent."""

    # ── the loop: the engine's thread ────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step_began_at = self._clock()
                events = self.step()
                self._step_began_at = None
                self._publish(events)
        except DeviceLost as error:
            self._has_failed = True
            engine_log.critical("%s: ending all jobs, accepting no more", error, exc_info=error)
        except Exception:
            self._has_failed = True
            engine_log.exception("engine thread failed; ending all jobs, accepting no more")
        finally:
            self._shut_down()

    def _publish(self, events: list[Event]) -> None:
        if events and self._sink is not None:
            try:
                self._sink(events)
            except Exception:
                engine_log.exception("event sink failed; %d events lost", len(events))
