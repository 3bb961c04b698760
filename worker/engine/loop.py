"""The engine: one thread turns jobs into tokens, a step at a time, on any ``Backend``.

::

    any thread      submit ─▶ inbox          cancel, pause ─▶ plain flags of the job
                                │                          │
    engine thread   ┌───────────▼──────────────────────────▼───────────────────────────┐
                    │ expire → take commands → pause → schedule → compute → apply      │ ─▶ sink
                    └──────────────────────────── one step ────────────────────────────┘

An ended request is freed once the backend no longer touches its memory. With overlap, that is once
the last step launched with it has been read.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from secrets import randbits

from protocol import (
    AbortCause,
    Code,
    FinishReason,
    KvReport,
    TokenLogprob,
    WorkerStats,
)
from worker.core import (
    Clock,
    Event,
    EventSink,
    Job,
    JobFinished,
    JobPrompt,
    JobStarted,
    JobTokens,
    StepUnderWay,
)
from worker.engine.backend import Backend, Executed
from worker.engine.expiry import ExpiryCheck, Pauses
from worker.errors import DeviceLost
from worker.log import engine_log
from worker.scheduler.end_reason import (
    ABORTED,
    DRAINED,
    LENGTH,
    NOT_FINITE,
    NOT_FINITE_LOG,
    STOPPED,
    TOO_LATE_TO_START,
    EndReason,
    failed,
    finished,
    loss_of,
)
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import Request

IDLE_CHECK_S = 1.0
"""Idle seconds before the backend's integrity is checked: no job waits for the check then."""
STALLED_S = 0.005
"""Seconds between checks of deadlines while requests wait for blocks to be loaded."""
PAUSED_S = 0.1
"""Seconds between checks while no request can be computed, unless a deadline is nearer."""
STATS_AGE_S = 0.02
"""Age in seconds at which statistics are renewed: a snapshot costs as much as several rows of a
step, and few snapshots are read."""


@dataclass
class _Totals:
    """The counters in ``WorkerStats`` that the loop keeps."""

    jobs_total: int = 0
    tokens_total: int = 0
    late_tokens_total: int = 0
    steps_total: int = 0
    busy_ms_total: float = 0.0
    prompt_steps_total: int = 0
    prompt_busy_ms_total: float = 0.0
    prefill_tokens_total: int = 0
    context_tokens_total: int = 0
    not_finite_total: int = 0


class EngineLoop:
    """An ``EngineService`` over a backend. ``start`` runs ``step`` on its own thread; tests and
    simulators call ``step`` directly. ``clock`` returns monotonic seconds."""

    def __init__(
        self,
        backend: Backend,
        eos_token_ids: Collection[int],
        *,
        clock: Clock = time.monotonic,
        draw_seed: Callable[[], int] = lambda: randbits(64),
    ) -> None:
        """``draw_seed`` returns 64 random bits for a job without a seed."""
        self.backend = backend
        self._clock = clock
        self._eos = frozenset(eos_token_ids)
        self._draw_seed = draw_seed
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._has_failed = False
        self._step_began_at: float | None = None
        """Clock time at which the current step began; None between two steps."""
        self._thread: threading.Thread | None = None
        self._sink: EventSink | None = None
        self._roster = backend.roster
        self._step_time = backend.roster.step_time
        self._deferred: dict[Request, EndReason] = {}
        """End reasons of ended requests that still hold memory."""
        self._expiry = ExpiryCheck(clock, self._step_time, backend.steps_in_flight)
        self._inbox: deque[Request] = deque()
        self._news = False
        """Whether news came since the last check."""
        self._compiled = False
        """Whether a grammar became ready since the last check."""
        self._stalled = False
        """Whether requests exist but none can be computed until one is loaded or resumed."""
        self._pauses = Pauses(backend)
        self._totals = _Totals()
        self._stats_due = False
        """Whether a job began or ended since the last snapshot, which was made at ``_stats_at``."""
        self._stats_at = -math.inf
        backend.attach(self._tell)
        self._stats = self._snapshot()

    # ── the surface: any thread ──────────────────────────────────────────────────────────────

    def start(self, sink: EventSink) -> None:
        """Start the engine's thread, which calls ``sink`` and waits while ``sink`` blocks."""
        if self._thread is not None or self._stopped:
            raise RuntimeError("an engine starts once, and this one has started; build another one")
        self.connect(sink)
        self._thread = threading.Thread(target=self._run, name="tidegate-engine", daemon=True)
        self._thread.start()

    def connect(self, sink: EventSink) -> None:
        """Send events that do not depend on a step to ``sink`` at once; ``start`` calls this."""
        self._sink = sink

    def submit(self, job: Job) -> None:
        # After ``stop`` the caller's thread sends the refusal to the sink.
        request = Request(job, submitted_at=self._clock(), own_seed=self._draw_seed())
        sampling = job.sampling
        request.end_ids = frozenset() if sampling.ignore_eos else self._eos
        if sampling.stop_token_ids:
            request.end_ids = request.end_ids.union(sampling.stop_token_ids)
        self.backend.prepare(request)
        request.compiling = job.constraint is not None
        with self._wake:
            is_taken = not self._stopped
            if is_taken:
                self._inbox.append(request)
                self._tell()
        if not is_taken:
            self._publish([self._record(request, DRAINED)])
        elif job.constraint is not None:
            job.constraint.when_ready(self._one_is_compiled)

    def cancel(self, job: Job, cause: AbortCause) -> None:
        with self._wake:
            if job.abort is not None:
                return
            job.aborted_at = self._clock()
            job.abort = cause
            self._tell()

    def pause(self, job: Job) -> None:
        self._request_pause(job, True)

    def resume(self, job: Job) -> None:
        self._request_pause(job, False)

    def _request_pause(self, job: Job, wanted: bool) -> None:
        with self._wake:
            if job.pause_requested != wanted:
                job.pause_requested = wanted
                self._pauses.asked = True
                self._tell()

    def stats(self) -> WorkerStats:
        """The state after a step, at most ``STATS_AGE_S`` old and never older than a published end.
        Without an engine thread, it is the state after the last step."""
        if self._thread is None:
            self._stats = self._snapshot()
        return self._stats

    def kv_report(self) -> KvReport | None:
        return self.backend.kv_report()

    @property
    def has_failed(self) -> bool:
        return self._has_failed or self.backend.has_failed

    @property
    def step_under_way(self) -> StepUnderWay | None:
        began_at = self._step_began_at
        if began_at is None:
            return None
        slow_s = self._step_time.slow_step_s(self.backend.largest_step_tokens)
        return StepUnderWay(began_at, slow_s)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._tell()
        if self._thread is None:
            self._shut_down()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _tell(self) -> None:
        """Note news, and wake the engine and its backend."""
        with self._wake:
            self._news = True
            self._wake.notify()
            if not self._stopped:
                self.backend.interrupt()

    def _one_is_compiled(self) -> None:
        self._compiled = True
        self._tell()

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

    def _wait_for_work(self) -> bool:
        """Sleep until there is work or news; False when it is time to stop."""
        with self._wake:
            idle_s = self.idle_s()
            if idle_s == math.inf and not self._wake.wait_for(lambda: self._news, IDLE_CHECK_S):
                self.backend.check_integrity()
                idle_s = max(0.0, self.backend.next_expiry - self._clock())
            if idle_s:
                self._wake.wait_for(lambda: self._news, min(idle_s, threading.TIMEOUT_MAX))
            return not self._stopping

    @property
    def has_work(self) -> bool:
        """Whether any job has not ended yet."""
        return bool(self._inbox) or self._roster.has_work

    def idle_s(self) -> float:
        """Seconds until a step is needed if no news comes; 0 while one can be computed."""
        if not self._roster.has_work:
            return math.inf
        return self._patience_s() if self._stalled else 0.0

    def _patience_s(self) -> float:
        """Seconds to sleep while nothing can be computed and no news comes."""
        roster = self._roster
        if any(request.loading for request in roster.waiting):
            return STALLED_S
        held = [*roster.running, *roster.waiting, *roster.paused]
        deadline = min((one.job.deadline for one in held), default=math.inf)
        left_s = deadline - self._clock() - self._step_time.slow_step_s(0)
        return max(STALLED_S, min(PAUSED_S, left_s))

    def step(self) -> list[Event]:
        """Do one step. Returns its events that are not published yet, in order for each job."""
        events: list[Event] = []
        backend = self.backend
        self._news = False
        now = self._clock()
        backend.begin(now)
        self._end_expired(now, events)
        self._take_commands(now, events)
        if self._compiled:
            self._take_compiled(events)
        events += self._pauses.settle()
        self._publish_early(events)
        done = backend.compute(self._schedule(now, events), self._patience_s)
        self._stalled = done is None and self._roster.has_work
        if done is not None:
            self._take(done, events)
        backend.end()
        if self._stats_due or now >= self._stats_at + STATS_AGE_S or not self._roster.has_work:
            self._stats_due, self._stats_at = False, now
            self._stats = self._snapshot()
        return events

    def _end_expired(self, now: float, events: list[Event]) -> None:
        """End aborted and expired jobs, so that their memory is free before the next step."""
        roster, expiry = self._roster, self._expiry

        def prompt_tokens() -> int:
            return self.backend.next_prompt_tokens(now, is_more_coming=bool(self._inbox))

        begun = [*roster.running, *roster.paused] if roster.paused else roster.running
        for request in expiry.expired(begun, now, prompt_tokens):
            self._finish(request, expiry.end_reason(request, now), events)
        if not roster.waiting:
            return
        for request in expiry.unfinishable(roster.waiting, now):
            self._finish(request, expiry.end_reason(request, now), events)
        floor = now + roster.min_start_budget_s
        for request in [one for one in roster.waiting if one.job.deadline <= floor]:
            self._finish(request, TOO_LATE_TO_START, events)

    def _take_commands(self, now: float, events: list[Event]) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            self._totals.jobs_total += 1
            self._stats_due = True
            if (cause := request.job.abort) is not None:
                events.append(self._record(request, ABORTED[cause]))
                continue
            if (refusal := self._roster.enqueue(request, now)) is not None:
                events.append(self._record(request, refusal))
                continue
            if request.compiling:
                # Its grammar may have become ready before the request was registered here.
                self._compiled = True
            if request.job.pause_requested:
                self._pauses.asked = True

    def _take_compiled(self, events: list[Event]) -> None:
        """Start requests with ready grammars, and end those with invalid ones."""
        self._compiled = False
        for request in [one for one in self._roster.waiting if one.compiling]:
            constraint = request.job.constraint
            if constraint is None or not constraint.is_ready:
                continue
            request.compiling = False
            self._roster.unblock()
            if constraint.error:
                self._finish(request, failed(Code.INVALID_REQUEST, constraint.error), events)

    def _schedule(self, now: float, events: list[Event]) -> Plan | None:
        schedule = self.backend.schedule(now)
        for request in schedule.started:
            if request.started_at is not None:  # it was preempted by a more urgent one
                continue
            # It may have been submitted since the step began, at ``now``.
            request.started_at = max(now, request.submitted_at)
            request.job.has_started = True
            self._stats_due = True
            wait_ms = (request.started_at - request.submitted_at) * 1e3
            events.append(JobStarted(request.job, wait_ms))
        for request, why in schedule.refused.items():
            self._finish(request, why, events)
        return schedule.plan

    def _take(self, done: Executed, events: list[Event]) -> None:
        """Apply a step's results, and end the requests that failed or finished in it."""
        for request in done.freed:
            events.append(self._record(request, self._deferred.pop(request)))
        for request, failure in done.failed.items():
            request.step_failed = True
            why = self._deferred.pop(request, failure)
            if why is not None:
                self._finish(request, why, events)
        if done.plan is not None:
            self._measure(done.plan, done)
            self._apply(done.plan, done, events)
        for request, reason in done.ended.items():
            if request in self._roster.running:  # otherwise it ended when its tokens were applied
                if reason.code is None and request.generated:
                    self._step_time.answered(request.generated)
                self._finish(request, reason, events)

    def _measure(self, plan: Plan, done: Executed) -> None:
        duration_s, prompt_tokens = done.duration_s, plan.tokens - plan.decodes
        totals, most = self._totals, max(map(len, done.result.ids))
        if most:
            self._step_time.decoded(
                duration_s, most, rows=len(plan.rows), prompt_tokens=prompt_tokens
            )
        self._step_time.prefilled(duration_s, prompt_tokens)
        totals.steps_total += 1
        totals.busy_ms_total += duration_s * 1e3
        if prompt_tokens:
            totals.prompt_steps_total += 1
            totals.prompt_busy_ms_total += duration_s * 1e3
            totals.prefill_tokens_total += prompt_tokens
        totals.context_tokens_total += sum([row.start for row in plan.rows[: plan.decodes]])

    def _apply(self, plan: Plan, done: Executed, events: list[Event]) -> None:
        """Count and publish the new tokens, except those of jobs that must stop."""
        now = self._clock()
        book = done.book
        assert book is not None
        # This loop runs for each row of each step, so invariants are looked up once.
        logprobs = done.result.logprobs or [None] * len(plan.rows)
        deferred, tokens = self._deferred, 0
        for index in done.result.not_finite:
            self._spoil(plan.rows[index].request)
        for index, read in (done.result.prompts or {}).items():
            request = plan.rows[index].request
            job = request.job
            if job.abort is None and now < job.deadline and request not in deferred:
                events += [JobPrompt(job, piece) for piece in read]
        for row, ids, row_logprobs in zip(plan.rows, done.result.ids, logprobs, strict=True):
            request = row.request
            job = request.job
            if job.abort is not None or now >= job.deadline or request in deferred:
                self._end_late(row, len(ids), now, done, events)
                continue
            if job.constraint is not None and job.constraint.error:
                # There was no mask, so the drawn token may violate the grammar.
                done.drop(row)
                why = failed(Code.INVALID_REQUEST, job.constraint.error)
                self._finish(request, why, events)
                continue
            if not ids:
                book(row, ids)
                continue
            end_reason = None
            if not request.end_ids.isdisjoint(ids):
                end = next(i for i, token in enumerate(ids, 1) if token in request.end_ids)
                ids, row_logprobs = _head(ids, row_logprobs, end)
                end_reason = STOPPED
            new = len(ids)
            text_tokens = row.start + row.count + new
            if text_tokens > request.limit_tokens:
                new -= text_tokens - request.limit_tokens
                ids, row_logprobs = _head(ids, row_logprobs, new)
                text_tokens, end_reason = request.limit_tokens, None
            book(row, ids)
            cached = None
            if request.first_token_at is None:
                request.first_token_at, cached = now, request.cached_tokens
            tokens += new
            if end_reason is None:
                if text_tokens < request.limit_tokens:
                    events.append(JobTokens(job, ids, row_logprobs, cached))
                    continue
                end_reason = LENGTH
            if job.sampling.max_tokens:
                events.append(JobTokens(job, ids, row_logprobs, cached))
                self._step_time.answered(text_tokens - request.prompt_tokens)
            else:  # this row only processed its prompt
                tokens -= new
                end_reason, request.tokens = LENGTH, request.tokens[: request.prompt_tokens]
            self._finish(request, end_reason, events)
        self._totals.tokens_total += tokens

    def _spoil(self, request: Request) -> None:
        """Fail a request with NaN or infinite logits, and never reuse its KV blocks."""
        if not request.spoilt:
            engine_log.error(NOT_FINITE_LOG, request.computed)
            self._totals.not_finite_total += 1
            self.backend.spoil(request)
        self._deferred.setdefault(request, NOT_FINITE)

    def _end_late(
        self, row: Row, tokens: int, now: float, done: Executed, events: list[Event]
    ) -> None:
        """End a job that must stop but was in this step; its new ``tokens`` are wasted."""
        request = row.request
        why = self._deferred.pop(request, None) or self._expiry.end_reason(request, now)
        if why.reason is not FinishReason.STOP:
            request.late_tokens += tokens
            self._totals.late_tokens_total += tokens
        done.drop(row)
        self._finish(request, why, events)

    def _publish_early(self, events: list[Event]) -> None:
        """Publish events before the step: ends and pauses do not wait for other jobs' step."""
        if events and self._sink is not None:
            # A reader of a job's end must not see older statistics that still count the job.
            self._stats = self._snapshot()
            self._publish(list(events))
            events.clear()

    # ── endings ──────────────────────────────────────────────────────────────────────────────

    def _finish(self, request: Request, end_reason: EndReason, events: list[Event]) -> None:
        """End a request at once, or as soon as its memory is free."""
        if self.backend.release(request, self._clock()):
            events.append(self._record(request, end_reason))
        else:
            self._deferred.setdefault(request, end_reason)

    def _record(self, request: Request, end_reason: EndReason) -> JobFinished:
        self._stats_due = True
        if request.job.constraint is not None:
            request.job.constraint.drop()
        return finished(request, end_reason, self._clock())

    def _shut_down(self) -> None:
        """End all remaining jobs and release the backend. Idempotent."""
        with self._wake:
            self._stopped = True
            inbox = list(self._inbox)
            self._inbox.clear()
        events: list[Event] = [self._record(request, DRAINED) for request in inbox]
        roster = self._roster
        left = dict.fromkeys([*roster.running, *roster.paused, *roster.waiting, *self._deferred])
        try:
            if not self._has_failed:
                self.backend.halt()
                for request in left:
                    self._finish(request, self._deferred.pop(request, DRAINED), events)
        except Exception:
            engine_log.exception("jobs could not be released; their process must end")
            self._has_failed = True
        if self._has_failed:
            # The state of the backend is unknown: all waiting jobs end, nothing is released.
            told = {event.job for event in events}
            for request in left:
                if request.job not in told:
                    why = self._deferred.get(request, loss_of(request.job))
                    events.append(self._record(request, why))
        self._publish(events)
        self.backend.close()
        self._stats = self._snapshot()

    def _snapshot(self) -> WorkerStats:
        return WorkerStats(
            step_ms=self._step_time.step_s * 1e3,
            check_us=self._expiry.check_us,
            **vars(self._totals),
            **self.backend.counts(),
        )


def _head(
    ids: list[int], logprobs: list[TokenLogprob] | None, count: int
) -> tuple[list[int], list[TokenLogprob] | None]:
    return ids[:count], logprobs and logprobs[:count]
