"""Drains a worker before it stops, because an open lane keeps Triton from stopping.

::

    serving ──Drain──▶ jobs end, lanes close ──▶ drained ──stopped──▶ gone
       ▲                                            │
       └────────── not stopped for HOLD_S ────┘

A model swap drains too, but keeps the lanes; ``release`` ends that drain.

Lane jobs that have not started are returned at once (``draining``), and their orchestrator sends
them elsewhere. Each report has the time left; the orchestrator moves jobs that cannot end by then.
"""

from collections.abc import Callable
from typing import Final

from protocol import AbortCause
from worker.core import Clock, EngineService
from worker.log import service_log
from worker.service.call import Responder
from worker.service.emitter import Emitter
from worker.service.lane import LaneJob

HOLD_S: Final = 30.0
"""Seconds after a drain before a worker that still runs accepts work again: whatever drained it did
not stop it, or no longer can."""


class Drainer:
    """Announces the drain, waits for running jobs, ends the rest and closes every lane.

    Runs on the emitter's thread, once per cycle.
    """

    def __init__(self, engine: EngineService, emitter: Emitter, clock: Clock) -> None:
        self.engine = engine
        """The draining engine."""
        self.is_swapping = False
        """Whether it drains for a model swap: lanes stay open, and clients may open more."""
        self._emitter = emitter
        self._clock = clock
        self._began_at = 0.0
        self._drained_at: float | None = None
        self._stops = False
        self._asked_by: list[Responder] = []
        self._on_drained: Callable[[], None] | None = None

    def begin(self, grace_s: float, responder: Responder | None) -> None:
        """Start draining, or shorten a running drain. ``responder`` is closed when the drain ends.

        ``responder`` is None if the worker itself drains to stop for good.
        """
        ends_at = self._clock() + grace_s
        if responder is None:
            self._stops = True
        else:
            self._asked_by.append(responder)
        self._drained_at = None  # a new request restarts the time to stop the worker
        self._drain_until(ends_at)

    @property
    def is_for_good(self) -> bool:
        """Whether the worker stops after the drain."""
        return self._stops or bool(self._asked_by) or self._drained_at is not None

    def begin_swap(self, grace_s: float, on_drained: Callable[[], None]) -> None:
        """Drain for a swap: ``on_drained`` is called once no jobs remain; lanes stay open."""
        self.is_swapping = True
        self._on_drained = on_drained
        self._drain_until(self._clock() + grace_s)

    def release(self) -> None:
        """End a swap's drain: accept work again, unless the worker is to stop."""
        self.is_swapping = False
        self._on_drained = None
        if not self.is_for_good:
            self._emitter.draining = False

    def _drain_until(self, ends_at: float) -> None:
        if self._emitter.draining:
            self._emitter.drain_ends_at = min(self._emitter.drain_ends_at, ends_at)
            self._emitter.announce()
            return
        self._began_at = self._clock()
        service_log.info(
            "draining: %d jobs have %.1f s to finish",
            len(self._emitter.job_replies),
            ends_at - self._began_at,
        )
        self._emitter.draining = True
        self._emitter.drain_ends_at = ends_at
        self._emitter.announce()  # first, so that orchestrators know why their jobs come back
        self._hand_back()

    def _hand_back(self) -> None:
        for job, reply in list(self._emitter.job_replies.items()):
            # A job that starts in the current step may have a token before this thread sees it.
            if isinstance(reply, LaneJob) and not job.has_started and job.abort is None:
                self.engine.cancel(job, AbortCause.DRAIN)

    def advance(self) -> None:
        """Take the drain's next step, if one is due."""
        if not self._emitter.draining:
            return
        if self._emitter.job_replies:
            self._hand_back()  # jobs that arrived as the drain began
            if self._clock() >= self._emitter.drain_ends_at:
                for job in list(self._emitter.job_replies):
                    self.engine.cancel(job, AbortCause.DRAIN)
            return
        if self._on_drained is not None:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()
        if self.is_swapping and not self.is_for_good:
            return
        self._emitter.close_lanes()
        for responder in self._asked_by:
            responder.close()
        self._asked_by.clear()
        now = self._clock()
        if self._drained_at is None:
            self._drained_at = now
            took_ms = 1000 * (now - self._began_at)
            service_log.info("drained: graceful_shutdown_duration_ms=%.0f", took_ms)
        elif not (self._stops or self.is_swapping) and now - self._drained_at >= HOLD_S:
            service_log.warning(
                "drained %.0f s ago and not stopped since: accepting work again", HOLD_S
            )
            self._drained_at = None
            self._emitter.draining = False
