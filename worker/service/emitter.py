"""The one thread that owns every response sender and every cancel check.

Triton's Python backend crashes if a sender is asked about cancellation after its final response,
and each call costs 50 to 180 µs, so no other thread of the worker may touch a sender.
The engine's thread queues events here; the request thread queues actions. Each cycle::

    take → run actions → apply events (text, stop strings) → flush replies
         → check for lost clients (bounded) → statistics and heartbeats

If sending falls behind, events accumulate and one response carries several tokens. If too many
accumulate, the engine's thread waits here, so that it cannot run ahead.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from protocol import AbortCause, Code, ModelCard, SwapReport, WorkerStats, brief
from worker.core import (
    Clock,
    EngineService,
    Event,
    Job,
    JobFinished,
    JobPaused,
    JobPrompt,
    JobResumed,
    JobStarted,
    JobTokens,
)
from worker.engine.kv_events import KvEvents
from worker.errors import ResponderLost, code_of
from worker.log import service_log
from worker.scheduler.end_reason import loss_of
from worker.service.call import Responder
from worker.service.lane import KvMirror, Lane
from worker.service.replies import JobReply, Reply

Action = Callable[[], None]

MAX_BACKLOG = 8
"""Number of event batches that may wait before the engine's thread must wait."""
LANE_CHECK_S = 0.020
PLAIN_CHECK_S = 0.035
"""Seconds between checks whether a plain request's client disconnected (a lane's:
``LANE_CHECK_S``). Each check is a round trip of 45 to 70 µs."""
IDLE_LANE_CHECK_S = 0.1
"""Seconds between checks of a lane without jobs: nothing is computed for a lost client."""
CHECK_EARLY = 0.25
"""Share of these intervals by which a check may come early, in a cycle that runs anyway: a wakeup
for the check alone costs several times as much as the check."""
CHECKS_PER_CYCLE = 8
"""Maximum number of checks per cycle, so that they delay tokens by at most half a millisecond."""
STATS_S = 0.1
"""Minimum seconds between statistics in frames with tokens."""


class Emitter:
    """Sends jobs' output to their clients, and detects clients that disconnect."""

    def __init__(
        self,
        engine: EngineService,
        *,
        heartbeat_s: float,
        clock: Clock,
        load_ms: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """``load_ms``: ms of each phase of the load; statistics include some of them."""
        self._engine = engine
        self._load_ms = load_ms
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._changed = threading.Condition()
        self._events: deque[list[Event]] = deque()
        self._actions: deque[Action] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tidegate-emitter", daemon=True)
        # The emitter's thread alone uses these, except that the request thread adds to
        # ``job_replies`` before the engine knows the job.
        self.job_replies: dict[Job, JobReply] = {}
        self._lanes: list[Lane] = []
        self._watched: dict[float, deque[tuple[float, Reply]]] = {
            LANE_CHECK_S: deque(),
            PLAIN_CHECK_S: deque(),
            IDLE_LANE_CHECK_S: deque(),
        }
        self._kv_mirror = KvMirror()
        self._before_events: list[Action] = []
        self._every_cycle: list[Action] = []
        self.draining = False
        self.drain_ends_at = 0.0
        """Clock time at which a drain ends the running jobs."""
        self.stuck_ms = 0.0
        """Milliseconds that the engine's step has taken, once that is far too long; otherwise 0."""

    # ── from any thread ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Action) -> None:
        """Run ``action`` soon on the emitter's thread."""
        with self._changed:
            self._actions.append(action)
            self._changed.notify_all()

    def fail(self, responder: Responder, error: Exception) -> None:
        """Answer a request with an error, which is logged unless the request caused it."""
        code, message = code_of(error), brief(error)
        if code is Code.INTERNAL:
            service_log.error("a request could not be accepted", exc_info=error)
        self.post(lambda: responder.fail(code, message))

    def sink(self, events: list[Event]) -> None:
        """Queue one engine step's events; wait while the backlog is full."""
        with self._changed:
            while len(self._events) >= MAX_BACKLOG and not self._stopping:
                self._changed.wait()
            self._events.append(events)
            self._changed.notify_all()

    def stop(self) -> None:
        """Apply the remaining events and actions, then end the thread. Close replies first."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    # ── on the emitter's thread ──────────────────────────────────────────────────────────────

    def open_lane(self, lane: Lane, card: ModelCard) -> None:
        self._lanes.append(lane)
        self._watched[LANE_CHECK_S].append((self._clock() + LANE_CHECK_S, lane))
        self.describe(lane, card)

    def describe(self, lane: Lane, card: ModelCard) -> None:
        """Send the card and the full state."""
        lane.next_frame().card = card
        self._read_kv_reports()
        lane.kv_events = KvEvents(self._kv_mirror.hashes)
        lane.report(self._stats(), draining=self.draining)
        lane.last_sent = self._clock()
        self.flush(lane)

    def announce(self, swap: SwapReport | None = None) -> None:
        """Tell every lane whether the worker drains, and the progress of a model ``swap``."""
        for lane in self._lanes:
            if swap is not None:
                lane.next_frame().swap = swap
            lane.report(self._stats(), draining=self.draining)
            self.flush(lane)

    def serve(self, engine: EngineService, load_ms: Mapping[str, float]) -> None:
        """Serve another engine from now on, without jobs of the old one; the caller starts it.

        Lanes drop the hashes of the old prefix cache; their next report says so.
        """
        self._engine, self._load_ms = engine, load_ms
        self._kv_mirror = KvMirror()
        for lane in self._lanes:
            lane.kv_events = KvEvents(())

    def describe_all(self, card: ModelCard) -> None:
        """Send a new card and the full state on every lane."""
        for lane in self._lanes:
            self.describe(lane, card)

    def close_lanes(self) -> None:
        """Send what is pending on every lane, then end its request."""
        for lane in self._lanes:
            self.flush(lane)
            if not lane.ended:
                lane.close()

    def hand_back_all(self) -> None:
        """Answer every job of a hung engine, and ignore the engine's later events."""
        ends: list[Event] = [
            JobFinished(job, *loss_of(job), len(job.token_ids)) for job in self.job_replies
        ]
        for reply in self._apply([ends]):
            self.flush(reply)

    def watch_closely(self, lane: Lane) -> None:
        """Check a lane that just got its first job as often as any lane with jobs."""
        idle = self._watched[IDLE_LANE_CHECK_S]
        for entry in idle:
            if entry[1] is lane:
                idle.remove(entry)
                self._watched[LANE_CHECK_S].append((self._clock() + LANE_CHECK_S, lane))
                return

    def watch(self, reply: Reply) -> None:
        """Check regularly whether a plain request's client has disconnected."""
        self._watched[PLAIN_CHECK_S].append((self._clock() + PLAIN_CHECK_S, reply))

    def before_events(self, action: Action) -> None:
        """Run ``action`` in every cycle before events are applied. They may be a failed engine's
        last events, and their receivers must learn why first."""
        self._before_events.append(action)

    def each_cycle(self, action: Action) -> None:
        """Run ``action`` at the end of every cycle (at least once per lane check)."""
        self._every_cycle.append(action)

    def cycle(self) -> None:
        """Do all work that is due now. Simulators call this instead of ``start``."""
        actions, batches = self._take()
        for action in actions:
            self._guarded(action)
        for action in self._before_events:
            self._guarded(action)
        for reply in self._apply(batches):
            self.flush(reply)
        self._guarded(self._read_kv_reports)
        self._guarded(self._check_for_lost_clients)
        self._guarded(self._heartbeat)
        for action in self._every_cycle:
            self._guarded(action)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._actions and not self._events and not self._stopping:
                    self._changed.wait(self._until_next_check())
            self.cycle()
            with self._changed:
                if self._stopping and not self._actions and not self._events:
                    return

    def _guarded(self, action: Action) -> None:
        """Run ``action`` and log its failure, so that the rest of the cycle still runs."""
        try:
            action()
        except Exception:
            service_log.exception("emitter cycle: one part failed")

    def _take(self) -> tuple[list[Action], list[list[Event]]]:
        with self._changed:
            actions, batches = list(self._actions), list(self._events)
            self._actions.clear()
            self._events.clear()
            self._changed.notify_all()
        return actions, batches

    def _until_next_check(self) -> float:
        dues = [queue[0][0] for queue in self._watched.values() if queue]
        beat_s = max(self._heartbeat_s, STATS_S)  # statistics are not sent more often
        dues += [lane.last_sent + beat_s for lane in self._lanes]
        return max(0.0, min(dues) - self._clock()) if dues else self._heartbeat_s

    def _apply(self, batches: list[list[Event]]) -> list[Reply]:
        """Pass events to their replies. Returns the replies that have something to send."""
        touched: dict[Reply, None] = {}
        job_replies = self.job_replies
        latest = None
        for batch in batches:
            for event in batch:
                job_reply = job_replies.get(event.job)
                if job_reply is None:
                    continue
                reply = job_reply.reply
                if reply is not latest:  # a lane's events are mostly adjacent
                    touched[reply] = None
                    latest = reply
                try:
                    if isinstance(event, JobTokens):
                        if job_reply.tokens(event):
                            self._engine.cancel(event.job, AbortCause.STOP_STRING)
                    elif isinstance(event, JobStarted):
                        job_reply.started(event)
                    elif isinstance(event, JobPaused):
                        job_reply.paused()
                    elif isinstance(event, JobResumed):
                        job_reply.resumed()
                    elif isinstance(event, JobPrompt):
                        job_reply.prompt(event)
                    else:
                        del job_replies[event.job]
                        job_reply.finished(event)
                except Exception:
                    service_log.exception("event could not be applied; cancelling its job")
                    self._engine.cancel(event.job, AbortCause.CANCEL)
                    if isinstance(event, JobFinished):  # no later event would end it
                        self._break(job_reply.reply)
        return list(touched)

    def flush(self, reply: Reply) -> None:
        """Send what is pending on ``reply`` now."""
        if isinstance(reply, Lane):
            now = self._clock()
            if now - reply.last_sent >= STATS_S:
                reply.report(self._stats(), draining=self.draining)
                reply.last_sent = now
        try:
            reply.flush()
        except ResponderLost as error:
            service_log.warning("Triton did not take a response (%s); canceling its jobs", error)
            self._lose(reply)
        except Exception:
            service_log.exception("a response could not be built; ending its request")
            self._break(reply)

    def _check_for_lost_clients(self) -> None:
        now, left = self._clock(), CHECKS_PER_CYCLE
        for interval, queue in self._watched.items():
            until = now + CHECK_EARLY * interval
            for _ in range(min(len(queue), left)):
                if queue[0][0] > until:
                    break
                _, reply = queue.popleft()
                if reply.ended:
                    continue
                left -= 1
                if reply.responder.is_cancelled():
                    self._lose(reply)
                    continue
                after_s = interval
                if isinstance(reply, Lane):
                    after_s = LANE_CHECK_S if reply.jobs else IDLE_LANE_CHECK_S
                self._watched[after_s].append((now + after_s, reply))

    def _lose(self, reply: Reply) -> None:
        """Stop the jobs of a disconnected client within one engine step."""
        is_lane = isinstance(reply, Lane)
        jobs = reply.running_jobs()
        for job in jobs:
            self._engine.cancel(job, AbortCause.LANE_LOST if is_lane else AbortCause.DISCONNECT)
        if is_lane:
            service_log.info("lane lost with %d jobs; cancelling them", len(jobs))
            self._guarded(reply.close)

    def _break(self, reply: Reply) -> None:
        """Stop the jobs of a client that can no longer be reached, and end its request."""
        self._lose(reply)
        self._guarded(reply.close)

    def _read_kv_reports(self) -> None:
        while (report := self._engine.kv_report()) is not None:
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
        return msgspec.structs.replace(
            stats,
            lanes=len(self._lanes),
            load_ms=self._load_ms.get("total", 0.0),
            cuda_init_ms=self._load_ms.get("cuda_init", 0.0),
            drain_left_ms=(
                max(0.0, 1000 * (self.drain_ends_at - self._clock())) if self.draining else None
            ),
            stuck_ms=self.stuck_ms,
        )
