"""The one thread that owns every response sender and every cancel check.

Triton's Python backend crashes as a whole when a sender is asked about cancellation after its
final response, and its calls cost 50 to 180 µs each, so nothing else in the worker may touch one.
The engine's thread leaves events here; the request thread leaves actions. Each cycle::

    take → run actions → apply events (text, stop strings) → flush outlets
         → look for lost clients (bounded) → statistics and heartbeats

When sending falls behind, events pile up and one response then carries several tokens; when too
many pile up, the engine's thread waits here, so that it cannot run ahead of what can be sent.
"""

import threading
from collections import deque
from collections.abc import Callable

from worker.core import (
    Clock,
    EngineService,
    Event,
    Job,
    JobFinished,
    JobPaused,
    JobResumed,
    JobStarted,
    JobTokens,
)
from worker.log import service_log
from worker.protocol import AbortCause, ModelCard, WorkerStats
from worker.service.call import ResponderLost
from worker.service.kv_events import KvEvents, KvMirror
from worker.service.lane import Lane
from worker.service.replies import Outlet, Route

Action = Callable[[], None]

MAX_BACKLOG = 8
"""Batches of events that may wait here before the engine's thread has to."""
LANE_CHECK_S = 0.020
PLAIN_CHECK_S = 0.035
"""How often an outlet is asked whether its client is gone: a round trip of 45 to 70 µs each."""
CHECKS_PER_CYCLE = 8
"""So that looking never delays tokens by more than about half a millisecond."""
STATS_S = 0.1
"""Statistics ride along with tokens at most this often."""


class Emitter:
    """Sends what jobs produce to where it belongs, and notices when nobody is left to read."""

    def __init__(self, engine: EngineService, *, heartbeat_s: float, clock: Clock) -> None:
        self._engine = engine
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._changed = threading.Condition()
        self._events: deque[list[Event]] = deque()
        self._actions: deque[Action] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tidegate-emitter", daemon=True)
        # Below: touched by the emitter's thread only, but for ``routes``, which the request
        # thread adds to (before the engine can know the job).
        self.routes: dict[Job, Route] = {}
        self._lanes: list[Lane] = []
        self._watched: dict[float, deque[tuple[float, Outlet]]] = {
            LANE_CHECK_S: deque(),
            PLAIN_CHECK_S: deque(),
        }
        self._kv_mirror = KvMirror()
        self._every_cycle: list[Action] = []
        self.draining = False

    # ── from any thread ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Action) -> None:
        """Run ``action`` on the emitter's thread, soon."""
        with self._changed:
            self._actions.append(action)
            self._changed.notify_all()

    def sink(self, events: list[Event]) -> None:
        """Take one engine step's events; waits while the backlog is full."""
        with self._changed:
            while len(self._events) >= MAX_BACKLOG and not self._stopping:
                self._changed.wait()
            self._events.append(events)
            self._changed.notify_all()

    def stop(self) -> None:
        """Apply what was left here, then end the thread. Close outlets before."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    # ── on the emitter's thread ──────────────────────────────────────────────────────────────

    def open_lane(self, lane: Lane) -> None:
        self._lanes.append(lane)
        self._watched[LANE_CHECK_S].append((self._clock() + LANE_CHECK_S, lane))
        self._report_everything(lane)

    def describe(self, lane: Lane, card: ModelCard) -> None:
        """Send the card and the whole state again."""
        lane.describe(card)
        self._report_everything(lane)

    def _report_everything(self, lane: Lane) -> None:
        self._read_kv_reports()
        lane.kv_events = KvEvents(self._kv_mirror.hashes)
        lane.report(self._stats(), draining=self.draining)
        lane.last_sent = self._clock()
        self.flush(lane)

    def announce(self) -> None:
        """Tell every lane that the worker drains."""
        for lane in self._lanes:
            lane.report(self._stats(), draining=True)
            self.flush(lane)

    def close_lanes(self) -> None:
        """End every lane's request, after what is pending on it."""
        for lane in self._lanes:
            self.flush(lane)
            if not lane.ended:
                lane.close()

    def watch(self, outlet: Outlet) -> None:
        """Look regularly whether the client of a plain request is gone."""
        self._watched[PLAIN_CHECK_S].append((self._clock() + PLAIN_CHECK_S, outlet))

    def each_cycle(self, action: Action) -> None:
        """Run ``action`` at the end of every cycle (at least once per lane check)."""
        self._every_cycle.append(action)

    def cycle(self) -> None:
        """Do what there is to do now. Simulators call it instead of ``start``."""
        actions, batches = self._take()
        for action in actions:
            self._guarded(action)
        for outlet in self._apply(batches):
            self.flush(outlet)
        self._guarded(self._read_kv_reports)
        self._guarded(self._look_for_lost_clients)
        self._guarded(self._heartbeat)
        for action in self._every_cycle:
            self._guarded(action)

    def _run(self) -> None:
        while True:
            self._wait()
            self.cycle()
            with self._changed:
                if self._stopping and not self._actions and not self._events:
                    return

    def _guarded(self, action: Action) -> None:
        """Run ``action``; its failure costs nobody else their turn."""
        try:
            action()
        except Exception:
            service_log.exception("a part of the emitter's cycle failed; going on")

    def _wait(self) -> None:
        with self._changed:
            if not self._actions and not self._events and not self._stopping:
                self._changed.wait(self._until_next_check())

    def _take(self) -> tuple[list[Action], list[list[Event]]]:
        with self._changed:
            actions, batches = list(self._actions), list(self._events)
            self._actions.clear()
            self._events.clear()
            self._changed.notify_all()
        return actions, batches

    def _until_next_check(self) -> float:
        dues = [queue[0][0] for queue in self._watched.values() if queue]
        return max(0.0, min(dues) - self._clock()) if dues else self._heartbeat_s

    def _apply(self, batches: list[list[Event]]) -> list[Outlet]:
        """Run events through their routes; returns the outlets that have something to send."""
        touched: dict[Outlet, None] = {}
        routes = self.routes
        for batch in batches:
            for event in batch:
                route = routes.get(event.job)
                if route is None:
                    continue
                touched[route.outlet] = None
                try:
                    if isinstance(event, JobTokens):
                        if route.tokens(event):
                            self._engine.cancel(event.job, AbortCause.STOP_STRING)
                    elif isinstance(event, JobStarted):
                        route.started(event)
                    elif isinstance(event, JobPaused):
                        route.paused()
                    elif isinstance(event, JobResumed):
                        route.resumed()
                    else:
                        del routes[event.job]
                        route.finished(event)
                except Exception:
                    service_log.exception("an event could not be applied; its job is cancelled")
                    self._engine.cancel(event.job, AbortCause.CANCEL)
                    if isinstance(event, JobFinished):  # nothing follows that could end it
                        self._break(route.outlet)
        return list(touched)

    def flush(self, outlet: Outlet) -> None:
        """Send what is pending on ``outlet`` now."""
        if isinstance(outlet, Lane):
            now = self._clock()
            if now - outlet.last_sent >= STATS_S:
                outlet.report(self._stats(), draining=self.draining)
                outlet.last_sent = now
        try:
            outlet.flush()
        except ResponderLost as error:
            service_log.warning("a response was not taken (%s); its jobs are cancelled", error)
            self._lose(outlet)
        except Exception:
            service_log.exception("a response could not be made; its request is ended")
            self._break(outlet)

    def _look_for_lost_clients(self) -> None:
        now = self._clock()
        for interval, queue in self._watched.items():
            for _ in range(min(len(queue), CHECKS_PER_CYCLE)):
                if queue[0][0] > now:
                    break
                _, outlet = queue.popleft()
                if outlet.ended:
                    continue
                if outlet.responder.is_cancelled():
                    self._lose(outlet)
                else:
                    queue.append((now + interval, outlet))

    def _lose(self, outlet: Outlet) -> None:
        """The client is gone: stop its jobs within one engine step."""
        is_lane = isinstance(outlet, Lane)
        jobs = outlet.jobs()
        for job in jobs:
            self._engine.cancel(job, AbortCause.LANE_LOST if is_lane else AbortCause.DISCONNECT)
        if is_lane:
            service_log.info("a lane is lost with %d jobs", len(jobs))
            self._guarded(outlet.close)

    def _break(self, outlet: Outlet) -> None:
        """Nothing can be told to this client any more: stop its jobs, end its request."""
        self._lose(outlet)
        self._guarded(outlet.close)

    def _read_kv_reports(self) -> None:
        for report in self._engine.kv_reports():
            self._kv_mirror.apply(report)
            for lane in self._lanes:
                lane.kv_events.add(report)

    def _heartbeat(self) -> None:
        now = self._clock()
        if any(lane.ended for lane in self._lanes):
            self._lanes = [lane for lane in self._lanes if not lane.ended]
        for lane in self._lanes:
            if now - lane.last_sent >= self._heartbeat_s:
                self.flush(lane)

    def _stats(self) -> WorkerStats:
        stats = self._engine.stats()
        return WorkerStats(
            kv_blocks_total=stats.kv_blocks_total,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_free=stats.kv_blocks_free,
            running=stats.running,
            waiting=stats.waiting,
            step_ms=stats.step_ms,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            tokens_total=stats.tokens_total,
            late_tokens_total=stats.late_tokens_total,
            jobs_total=stats.jobs_total,
            check_us=stats.check_us,
            lanes=len(self._lanes),
            steps_total=stats.steps_total,
            busy_ms_total=stats.busy_ms_total,
            prefill_tokens_total=stats.prefill_tokens_total,
            cached_tokens_total=stats.cached_tokens_total,
            kv_blocks_cached=stats.kv_blocks_cached,
            evicted_blocks_total=stats.evicted_blocks_total,
            hit_blocks_total=stats.hit_blocks_total,
            missed_blocks_total=stats.missed_blocks_total,
            disk_saved_blocks_total=stats.disk_saved_blocks_total,
            disk_loaded_blocks_total=stats.disk_loaded_blocks_total,
            disk_save_ms_total=stats.disk_save_ms_total,
            disk_load_ms_total=stats.disk_load_ms_total,
            disk_failures_total=stats.disk_failures_total,
            disk_skipped_blocks_total=stats.disk_skipped_blocks_total,
            stream_utilization=stats.stream_utilization,
            paused=stats.paused,
        )
