"""The engine: one thread that turns jobs into tokens, a step at a time.

::

    any thread      submit ─▶ inbox          cancel, pause ─▶ plain flags of the job
                                │                          │
    engine thread   ┌───────────▼──────────────────────────▼───────────────────────────┐
                    │ expire → take commands → pause → schedule → execute → apply      │ ─▶ sink
                    └──────────────────────────── one step ────────────────────────────┘

A request that has ended is freed when the last step that was launched with it has been read.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from secrets import randbits

import numpy as np
from numpy.typing import NDArray

from protocol import (
    FinishReason,
    KvReport,
    PromptLogprobs,
    TokenLogprob,
    WorkerStats,
    prefix_salt,
)
from worker.core import (
    Clock,
    Event,
    Job,
    JobFinished,
    JobPrompt,
    JobStarted,
    JobTokens,
    StepUnderWay,
)
from worker.engine.executor import Executed, Executor
from worker.engine.expiry import ExpiryCheck
from worker.engine.kv_events import KvEventQueue
from worker.engine.stats import Totals, snapshot
from worker.engine.threaded import ThreadedEngine
from worker.kv_disk.base import NoTier, Tier
from worker.log import engine_log
from worker.runner.base import Runner
from worker.runner.out_of_memory import StepMemory
from worker.scheduler.end_reason import (
    ABORTED,
    DRAINED,
    LENGTH,
    NOT_FINITE,
    NOT_FINITE_LOG,
    STOPPED,
    TOO_LATE_TO_START,
    EndReason,
    finished,
    grammar_failed,
    loss_of,
)
from worker.scheduler.pauses import Pauses
from worker.scheduler.plan import Plan, Row, StepResult
from worker.scheduler.request import Request, make_request
from worker.scheduler.scheduler import Scheduler

IDLE_CHECK_S = 1.0
"""Idle seconds after which the scheduler's integrity is checked: no job waits for it then."""
STALLED_S = 0.005
"""Seconds between checks of deadlines while requests wait for blocks to be loaded."""
PAUSED_S = 0.1
"""Seconds between checks while no request can be computed, unless a deadline is nearer."""
STATS_AGE_S = 0.02
"""Age in seconds at which statistics are renewed: a snapshot costs as much as several rows of a
step, and few are ever read."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``hash_salt`` is the card's; ``overlap`` is for runners that can (``OverlappingRunner``)."""

    eos_token_ids: Collection[int] = ()
    hash_salt: bytes = b""
    overlap: bool = False


class Engine(ThreadedEngine):
    """An ``EngineService`` over a scheduler and a runner.

    ``draw_seed`` gives 64 random bits for a job without a seed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        config: EngineConfig,
        *,
        tier: Tier | None = None,
        memory: StepMemory | None = None,
        clock: Clock = time.monotonic,
        draw_seed: Callable[[], int] = lambda: randbits(64),
    ) -> None:
        super().__init__(clock)
        self.scheduler = scheduler
        self.executor = Executor(
            scheduler, runner, memory or StepMemory(), clock, overlap=config.overlap
        )
        self._eos = frozenset(config.eos_token_ids)
        self._hash_salt = config.hash_salt
        self._draw_seed = draw_seed
        self._tier: Tier = tier or NoTier()
        self._step_time = scheduler.step_time
        self._deferred: dict[Request, EndReason] = {}
        """End reasons of requests that have ended, but of which a launched step still has a row."""
        self._expiry = ExpiryCheck(clock, self._step_time, int(self.executor.launcher is not None))
        self._inbox: deque[Request] = deque()
        self._stalled = False
        """Whether there are requests, but none can be computed until one is loaded or resumed."""
        self._pauses = Pauses(scheduler)
        self._compiled = False
        """Whether a grammar became ready since the latest look."""
        self._one_is_aborted = False
        """Whether a job was aborted since the latest check."""
        self._kv_events = KvEventQueue(scheduler.pool)
        self._totals = Totals()
        self._stats_due = False
        """Whether something began or ended since the latest snapshot, made at ``_stats_at``."""
        self._stats_at = -math.inf
        self._tier.attach(self._notify)
        self._stats = self._snapshot()

    # ── the surface: any thread ──────────────────────────────────────────────────────────────

    def submit(self, job: Job) -> None:
        """Queue a job. After ``stop`` its refusal reaches the sink on the caller's thread."""
        request = make_request(job, submitted_at=self._clock(), own_seed=self._draw_seed())
        sampling = job.sampling
        request.end_ids = frozenset() if sampling.ignore_eos else self._eos
        if sampling.stop_token_ids:
            request.end_ids = request.end_ids.union(sampling.stop_token_ids)
        if request.prompt_tokens < self.scheduler.capacity_tokens:
            self.scheduler.prefix_cache.hash_prompt(
                request, prefix_salt(self._hash_salt, job.cache_salt)
            )
        request.compiling = job.constraint is not None
        with self._wake:
            is_taken = not self._stopped
            if is_taken:
                self._inbox.append(request)
                self._wake.notify()
        if not is_taken:
            self._publish([self._record(request, DRAINED)])
        elif job.constraint is not None:
            job.constraint.when_ready(self._one_is_compiled)

    def _aborted(self) -> None:
        self._one_is_aborted = True
        self._wake.notify()

    def _pause_requested(self) -> None:
        self._pauses.ask()
        self._wake.notify()

    def stats(self) -> WorkerStats:
        """The state after a step: at most ``STATS_AGE_S`` old, and never older than a published
        end; that of the latest step where the engine has no thread of its own."""
        if self._thread is None:
            self._stats = self._snapshot()
        return self._stats

    def kv_reports(self) -> list[KvReport]:
        """See ``EngineService``."""
        return self._kv_events.take()

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """See ``EngineService``."""
        began_at = self._step_began_at
        if began_at is None:
            return None
        most_tokens = self.scheduler.config.max_step_tokens
        return StepUnderWay(began_at, self._step_time.slow_step_s(most_tokens))

    # ── the loop: the engine's thread ────────────────────────────────────────────────────────

    def _wait_for_work(self) -> bool:
        """Sleep until there is work or news; False when it is time to stop."""
        with self._wake:
            idle_s = self.idle_s()
            if idle_s == math.inf:
                if not self._wake.wait_for(self._has_news, IDLE_CHECK_S):
                    self.scheduler.check_integrity()
                    expiry_s = self.scheduler.sessions.next_expiry - self._clock()
                    self._wake.wait_for(
                        self._has_news, max(0.0, min(expiry_s, threading.TIMEOUT_MAX))
                    )
            elif idle_s:
                self._wake.wait_for(self._has_news, idle_s)
            return not self._stopping

    def idle_s(self) -> float:
        """Seconds for which no step is needed unless there is news; 0 while one can be computed."""
        if not self.scheduler.has_work:
            return math.inf
        return self._patience_s() if self._stalled else 0.0

    def _has_news(self) -> bool:
        return (
            self._stopping
            or self._one_is_aborted
            or self._pauses.asked
            or self._compiled
            or bool(self._inbox)
            or self._tier.has_results
        )

    def _patience_s(self) -> float:
        """Seconds to sleep while nothing can be computed and no command comes."""
        waiting, paused = self.scheduler.waiting, self.scheduler.paused
        if any(request.loading for request in waiting):
            return STALLED_S
        deadline = min((one.deadline for one in [*waiting, *paused]), default=math.inf)
        left_s = deadline - self._clock() - self._step_time.slow_step_s(0)
        return max(STALLED_S, min(PAUSED_S, left_s))

    def _one_is_compiled(self) -> None:
        """Note that a grammar is ready, and wake the engine. Any thread."""
        with self._wake:
            self._compiled = True
            self._wake.notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def step(self) -> list[Event]:
        """Do one step; returns the events not yet published during it, in order for each job."""
        events: list[Event] = []
        now = self._clock()
        self._one_is_aborted = False
        self._tier.collect(now)
        self._end_expired(now, events)
        self.scheduler.sessions.expire(now)
        self._take_commands(now, events)
        if self._compiled:
            self._take_compiled(events)
        events += self._pauses.settle(self.executor.in_flight)
        self._publish_early(events)
        self._tier.restore(self.scheduler.waiting, now)
        done = self.executor.run(self._schedule(now, events))
        self._stalled = done is None and self.scheduler.has_work
        if done is not None:
            for request, why in done.failed.items():
                request.step_failed = True
                why = self._deferred.pop(request, why)
                if why is not None:
                    self._finish(request, why, events)
            if done.plan is not None:
                self._measure(done.plan, done.result, done.duration_s)
                self._apply(done.plan, done, events)
        self._tier.spill()
        self._kv_events.publish()
        if self._stats_due or now >= self._stats_at + STATS_AGE_S or not self.scheduler.has_work:
            self._stats_due, self._stats_at = False, now
            self._stats = self._snapshot()
        return events

    def _end_expired(self, now: float, events: list[Event]) -> None:
        """End aborted and expired jobs, so that their blocks are free before the next step."""
        scheduler, expiry = self.scheduler, self._expiry
        begun = scheduler.running
        if scheduler.paused:
            begun = begun + scheduler.paused
        for request in expiry.expired(begun, now, self._next_prompt_tokens):
            self._finish(request, expiry.end_reason(request, now), events)
        if not scheduler.waiting:
            return
        for request in expiry.unfinishable(scheduler.waiting, now):
            self._finish(request, expiry.end_reason(request, now), events)
        for request in scheduler.too_late_to_start(now):
            self._finish(request, TOO_LATE_TO_START, events)

    def _next_prompt_tokens(self) -> int:
        return self.scheduler.next_prompt_tokens(bool(self._inbox))

    def _take_commands(self, now: float, events: list[Event]) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            self._totals.jobs += 1
            self._stats_due = True
            if (cause := request.job.abort) is not None:
                events.append(self._record(request, ABORTED[cause]))
                continue
            if (refusal := self.scheduler.enqueue(request, now)) is not None:
                events.append(self._record(request, refusal))
                continue
            if request.compiling:
                # Its grammar may have become ready before the request could be found here.
                self._compiled = True
            if request.job.pause_requested:
                self._pauses.ask()

    def _take_compiled(self, events: list[Event]) -> None:
        """Let requests start whose grammars are ready, and end those whose grammars are invalid."""
        self._compiled = False
        for request in [one for one in self.scheduler.waiting if one.compiling]:
            constraint = request.job.constraint
            if constraint is None or not constraint.is_ready:
                continue
            request.compiling = False
            self.scheduler.unblock()
            if constraint.error:
                self._finish(request, grammar_failed(constraint.error), events)

    def _schedule(self, now: float, events: list[Event]) -> Plan | None:
        schedule = self.scheduler.schedule(now)
        for request in schedule.started:
            if request.started_at is not None:  # had given way to a more urgent one
                continue
            # It may have been submitted since the step began, which is what ``now`` says.
            request.started_at = max(now, request.submitted_at)
            request.job.has_started = True
            self._stats_due = True
            wait_ms = (request.started_at - request.submitted_at) * 1e3
            events.append(JobStarted(request.job, wait_ms))
        return schedule.plan

    def _measure(self, plan: Plan, result: StepResult, duration_s: float) -> None:
        prompt_tokens = plan.tokens - plan.decodes
        most = max(map(len, result.ids))
        if most:
            self._step_time.decoded(
                duration_s, most, rows=len(plan.rows), prompt_tokens=prompt_tokens
            )
        self._step_time.prefilled(duration_s, prompt_tokens)
        self._totals.count_step(duration_s, prompt_tokens)

    def _apply(self, plan: Plan, done: Executed, events: list[Event]) -> None:
        """Count and publish the new tokens, except those of jobs that were to stop meanwhile."""
        now = self._clock()
        book = self.scheduler.confirm if done.was_launched else self.scheduler.advance
        # This loop runs for each row of each step: what does not change is looked up once.
        logprobs = done.result.logprobs or [None] * len(plan.rows)
        deferred, tokens = self._deferred, 0
        for index in done.result.not_finite:
            self._spoil(plan.rows[index].request)
        if done.result.prompts:
            self._tell_prompts(plan, done.result.prompts, now, events)
        for index, vector in (done.result.pooled or {}).items():
            pooling = plan.rows[index].request
            pooling.pooled = vector if pooling.pooled is None else pooling.pooled + vector
        for row, ids, row_logprobs in zip(plan.rows, done.result.ids, logprobs, strict=True):
            request = row.request
            job = request.job
            if job.abort is not None or now >= job.deadline or request in deferred:
                self._end_late(row, len(ids), now, done, events)
                continue
            if job.constraint is not None and job.constraint.error:
                # No mask could be made, so that the token drawn may break the grammar.
                if done.was_launched:
                    self.scheduler.discard(row)
                self._finish(request, grammar_failed(job.constraint.error), events)
                continue
            if not ids:
                book(row, ids)
                continue
            end_reason = None
            if not request.end_ids.isdisjoint(ids):
                ids, row_logprobs = _cut_after_end(ids, row_logprobs, request.end_ids)
                end_reason = STOPPED
            book(row, ids)
            if request.first_token_at is None:
                request.first_token_at = now
            new = len(ids)
            tokens += new
            text_tokens = row.start + row.count + new
            if end_reason is None:
                if text_tokens < request.limit_tokens:
                    events.append(JobTokens(job, ids, row_logprobs))
                    continue
                end_reason = LENGTH
            if job.sampling.max_tokens and job.pooling is None:
                events.append(JobTokens(job, ids, row_logprobs))
                self._step_time.answered(text_tokens - request.prompt_tokens)
            else:  # it was to read its prompt only
                tokens -= new
                end_reason, request.tokens = LENGTH, request.tokens[: request.prompt_tokens]
                if request.pooled is not None:
                    request.embedding = _normalised(request.pooled)
            self._finish(request, end_reason, events)
        self._totals.tokens += tokens

    def _spoil(self, request: Request) -> None:
        """Have a request fail whose logits are NaN or infinite, and its KV blocks not be reused."""
        if not request.spoilt:
            engine_log.error(NOT_FINITE_LOG, request.computed)
            self._totals.not_finite += 1
            self.scheduler.spoil(request)
            self._tier.forget(request.hashes[: request.full_blocks])
        self._deferred.setdefault(request, NOT_FINITE)

    def _tell_prompts(
        self,
        plan: Plan,
        prompts: dict[int, list[PromptLogprobs]],
        now: float,
        events: list[Event],
    ) -> None:
        """Publish prompt log-probabilities, except those of jobs that were to stop."""
        for index, read in prompts.items():
            request = plan.rows[index].request
            job = request.job
            if job.abort is None and now < job.deadline and request not in self._deferred:
                events += [JobPrompt(job, piece) for piece in read]

    def _end_late(
        self, row: Row, tokens: int, now: float, done: Executed, events: list[Event]
    ) -> None:
        """End a job that was to stop while its row was computed; its new ``tokens`` are waste."""
        request = row.request
        why = self._deferred.pop(request, None) or self._expiry.end_reason(request, now)
        if why.reason is not FinishReason.STOP:
            request.late_tokens += tokens
            self._totals.late_tokens += tokens
        if done.was_launched:
            self.scheduler.discard(row)
        self._finish(request, why, events)

    def _publish_early(self, events: list[Event]) -> None:
        """Publish events before the step: ends and pauses need not wait for a step of others."""
        if events and self._sink is not None:
            # Whoever hears of an end must not count its job by older statistics.
            self._stats = self._snapshot()
            self._publish(list(events))
            events.clear()

    # ── endings ──────────────────────────────────────────────────────────────────────────────

    def _finish(self, request: Request, end_reason: EndReason, events: list[Event]) -> None:
        """End a request: at once, or when the step that still has a row of it has been read."""
        if request in self.executor.in_flight:
            self._deferred.setdefault(request, end_reason)
            request.leaving = True
            return
        if request.blocks and not request.spoilt:
            self._tier.keep(request)
        self.scheduler.sessions.end(request, self._clock())
        if request.step_failed:
            self.scheduler.pool.spoil(request.blocks[request.full_blocks :])
        self.scheduler.release(request)
        events.append(self._record(request, end_reason))

    def _record(self, request: Request, end_reason: EndReason) -> JobFinished:
        self._stats_due = True
        if request.job.constraint is not None:
            request.job.constraint.drop()
        return finished(request, end_reason, self._clock())

    def _shut_down(self) -> None:
        """End all remaining jobs and release the runner. Idempotent."""
        with self._wake:
            self._stopped = True
            inbox = list(self._inbox)
            self._inbox.clear()
        events: list[Event] = [self._record(request, DRAINED) for request in inbox]
        scheduler = self.scheduler
        left = [*scheduler.running, *scheduler.paused, *scheduler.waiting]
        try:
            if not self._has_failed:
                self.executor.discard()
                for request in left:
                    self._finish(request, self._deferred.pop(request, DRAINED), events)
        except Exception:
            engine_log.exception("jobs could not be released; their process must end")
            self._has_failed = True
        if self._has_failed:
            # The state of scheduler and device is unknown: all who wait are told, nothing is
            # released.
            told = {event.job for event in events}
            for request in left:
                if request.job not in told:
                    why = self._deferred.get(request, loss_of(request.job))
                    events.append(self._record(request, why))
        self._publish(events)
        self._tier.close()
        self.executor.runner.close()
        self._stats = self._snapshot()

    def _snapshot(self) -> WorkerStats:
        busy = self.executor.stream_utilization
        return snapshot(self.scheduler, self._expiry, self._totals, self._tier.stats(), busy)


def _cut_after_end(
    ids: list[int], logprobs: list[TokenLogprob] | None, end_ids: frozenset[int]
) -> tuple[list[int], list[TokenLogprob] | None]:
    end = next(i for i, token in enumerate(ids, 1) if token in end_ids)
    return ids[:end], logprobs and logprobs[:end]


def _normalised(vector: NDArray[np.float32]) -> bytes:
    """``vector`` scaled to length 1, little-endian float32; a sum of states does as a mean."""
    wide = vector.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), 1e-12)).astype("<f4").tobytes()
