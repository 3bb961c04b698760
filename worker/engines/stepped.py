"""``SteppedEngine``: deadlines, aborts and accounts for a third-party engine.

::

    any thread      submit ─▶ inbox      cancel ─▶ plain flags of the job     (interrupt)
                                │                    │                           │
    engine thread   ┌───────────▼────────────────────▼───────────────────────────▼──────┐
                    │ take commands → expire → pause → admit → backend.step → apply     │ ─▶ sink
                    └──────────────────────── at most one step ─────────────────────────┘

    waiting ──admit──▶ running ──the backend's own end──────────▶ ended
       │               │  ▲ └──abort──▶ leaving ──the next step────▶ ended
       │               └▶ paused ──abort, deadline─────────────────▶ ended
       └──────────────────────abort, deadline──────────────────────▶ ended

A job that leaves keeps its place until its blocks are free, which with some backends is when the
next step returns, or later; its end is not published before, for ``LONGEST_LEAVE_S`` at most.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Final, NamedTuple, Self

from protocol import Code, Feature, FinishReason, KvReport, ModelCard, WorkerStats
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
from worker.engine.expiry import ExpiryCheck
from worker.engine.threaded import ThreadedEngine
from worker.engines.backend import NO_LOAD, Backend, BackendLoad, BackendTotals, Produced, snapshot
from worker.engines.pausing import BackendPauses, PausingBackend
from worker.errors import RequestError
from worker.log import engine_log
from worker.scheduler.end_reason import (
    ABORTED,
    DRAINED,
    LENGTH,
    STOPPED,
    TOO_LATE_TO_START,
    EndReason,
    finished,
    grammar_failed,
    loss_of,
)
from worker.scheduler.refusal import EngineLimits, lacking, refused
from worker.scheduler.request import Request, make_request
from worker.scheduler.step_time import StepTime

MAX_WAIT_S: Final = 0.1
"""Longest time in seconds that a backend may wait for work, unless a deadline is nearer."""
MIN_WAIT_S: Final = 0.001
LONGEST_LEAVE_S: Final = 0.25
"""Seconds after which a job that was given up ends although a backend still holds its memory."""
STATS_AGE_S: Final = 0.02
_ANY_TOKEN: Final = 2**31
NOT_TAKEN: Final = refused(
    Code.ENGINE_ERROR, "the engine could not take up this request; the worker's log says why"
)


class _Leave(NamedTuple):
    """Why a job leaves, and since when, on the clock."""

    why: EndReason
    since: float


@dataclass(frozen=True, slots=True)
class SteppedConfig:
    """Limits; the names are those of ``WorkerSettings`` and ``ModelCard``."""

    context_tokens: int
    """Most tokens of one job: the model's context, or what the backend's memory holds of it."""
    max_running: int
    max_waiting: int
    min_start_s: float
    eos_token_ids: Collection[int] = ()
    vocab_size: int = _ANY_TOKEN
    full_context_tokens: int = 0
    """The model's own context in tokens, where ``context_tokens`` is less."""
    max_step_tokens: int = 512
    lacks: Collection[Feature] = ()
    """Features that the engine lacks: a job that needs one is refused."""
    frees_at_once: bool = False
    """Whether ``Backend.abort`` frees a job's memory at once, not only after the next step."""

    @classmethod
    def of(cls, card: ModelCard, *, frees_at_once: bool) -> Self:
        """Limits as an engine's card tells them."""
        return cls(
            context_tokens=card.context_tokens,
            max_running=card.max_running,
            max_waiting=card.max_waiting,
            min_start_s=card.min_start_budget_ms / 1e3,
            eos_token_ids=card.eos_token_ids,
            vocab_size=card.vocab_size,
            full_context_tokens=card.full_context_tokens,
            max_step_tokens=card.max_step_tokens,
            lacks=card.lacks,
            frees_at_once=frees_at_once,
        )

    @property
    def limits(self) -> EngineLimits:
        """The limits beyond which a job is refused."""
        return EngineLimits(
            self.context_tokens,
            max(self.context_tokens, self.full_context_tokens),
            self.vocab_size,
            self.max_running + self.max_waiting,
            self.min_start_s,
        )


class SteppedEngine(ThreadedEngine):
    """An ``EngineService`` over any ``Backend``, on which it starts jobs, least slack first.

    ``kv_reports`` tells what entered and left a backend's prefix cache since the last call.
    ``pausing`` is the backend once more where it can pause jobs; without it the card must not say
    ``can_pause``.
    """

    def __init__(
        self,
        backend: Backend,
        config: SteppedConfig,
        *,
        kv_reports: Callable[[], list[KvReport]] = list,
        pausing: PausingBackend | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._backend = backend
        self._config = config
        self._limits = config.limits
        self._eos = frozenset(config.eos_token_ids)
        self._lacks = frozenset(config.lacks)
        self._read_kv_reports = kv_reports
        self._handles = itertools.count(1)
        self._waiting: list[Request] = []  # least slack first
        self._running: dict[int, Request] = {}
        self._leaving: dict[Request, _Leave] = {}
        """Jobs given up that may still be in the backend's memory."""
        self._pauses = BackendPauses(pausing)
        self.can_pause = self._pauses.can_pause
        self._step_time = StepTime()
        self._expiry = ExpiryCheck(clock, self._step_time, int(not config.frees_at_once))
        self._backend_began: float | None = None
        """When the backend's step began, on the clock; None while it has nothing to do."""
        self._prompt_tokens_seen = 0
        self._totals = BackendTotals()
        self._inbox: deque[Request] = deque()
        self._news = False
        """Whether something was submitted, aborted or compiled since the latest look."""
        self._events: list[Event] = []
        """Events not published yet, in order for each job."""
        self._stats_at = -math.inf
        self._stats_due = False
        self._stats = self._snapshot()

    # ── the surface: any thread ──────────────────────────────────────────────────────────────

    def submit(self, job: Job) -> None:
        """Queue a job. After ``stop`` its refusal reaches the sink on the caller's thread."""
        request = make_request(job, submitted_at=self._clock(), own_seed=0)
        request.end_ids = frozenset() if job.sampling.ignore_eos else self._eos
        request.end_ids = request.end_ids.union(job.sampling.stop_token_ids)
        request.compiling = job.constraint is not None
        with self._wake:
            is_taken = not self._stopped
            if is_taken:
                self._inbox.append(request)
        if not is_taken:
            self._publish([self._record(request, DRAINED)])
        elif job.constraint is not None:
            job.constraint.when_ready(self._notify)
        self._notify()

    def _aborted(self) -> None:
        self._notify()

    def _pause_requested(self) -> None:
        self._pauses.ask()
        self._notify()

    def stats(self) -> WorkerStats:
        """The state after a step: at most ``STATS_AGE_S`` old while there is work, and never older
        than a published end."""
        return self._stats

    def kv_reports(self) -> list[KvReport]:
        """See ``EngineService``."""
        return self._read_kv_reports()

    @property
    def has_failed(self) -> bool:
        """See ``EngineService``; also when the backend has failed while there was no work."""
        return self._has_failed or self._backend.has_failed

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """See ``EngineService``."""
        began_at = self._step_began_at
        if began_at is None:
            return None
        # Summed over a copy, since the engine's thread changes the original. Some backends read
        # whole prompts in one step, whatever the configuration says.
        tokens = sum(one.prompt_tokens for one in list(self._running.values()))
        return StepUnderWay(began_at, self._step_time.slow_step_s(tokens))

    def _notify(self) -> None:
        """Announce news: wakes the engine's thread, and the backend if its step waits."""
        with self._wake:
            self._news = True
            self._wake.notify()
            if not self._stopped:
                self._backend.interrupt()

    # ── the loop: the engine's thread ────────────────────────────────────────────────────────

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when it is time to stop."""
        with self._wake:
            if not self._running and not self._leaving:
                has_deadlines = self._waiting or self._pauses.paused
                patience_s = self._patience_s() if has_deadlines else None
                self._wake.wait_for(lambda: self._news or self._stopping, patience_s)
            return not self._stopping

    @property
    def has_work(self) -> bool:
        """Whether any job has not ended yet."""
        held = self._waiting or self._running or self._leaving or self._pauses.paused
        return bool(self._inbox or held)

    def step(self) -> list[Event]:
        """Do at most one step; returns the events not yet published, in order for each job."""
        self._news = False
        now = self._clock()
        self._take_commands(now)
        self._take_compiled()
        self._end_expired(now)
        slots = self._config.max_running - len(self._leaving)
        if moved := self._pauses.settle(self._running, self._waiting, slots):
            self._stats_due = True
            self._events += moved
        self._admit(now)
        if self._sink is not None:  # starts and ends need not wait for a step of others
            self._publish(self._take_events())
        if self._running or self._leaving:
            self._compute()
        else:
            self._backend_began = None
        if self._stats_due or now >= self._stats_at + STATS_AGE_S:
            self._stats_at = now
            self._stats = self._snapshot()
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take_commands(self, now: float) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            job = request.job
            self._totals.jobs += 1
            if job.abort is not None:
                self._told(request, ABORTED[job.abort])
                continue
            held = len(self._running) + len(self._leaving) + len(self._waiting)
            held += len(self._pauses.paused)
            refusal = lacking(job, self._lacks) or self._limits.refusal(request, held, now)
            if refusal is not None:
                self._told(request, refusal)
                continue
            self._limits.line_up(request, self._waiting, self._step_time)
            if job.pause_requested:
                self._pauses.ask()
            self._stats_due = True

    def _take_compiled(self) -> None:
        """Let requests start whose grammars are ready, and end those whose grammars are invalid."""
        for request in [one for one in self._waiting if one.compiling]:
            constraint = request.job.constraint
            if constraint is not None and constraint.is_ready:
                request.compiling = False
                if constraint.error:
                    self._drop(request, grammar_failed(constraint.error))

    def _end_expired(self, now: float) -> None:
        begun = [*self._running.values(), *self._pauses.paused.values()]
        expired = self._expiry.expired(begun, now, self._next_prompt_tokens)
        if expired:
            self._give_up({one: self._expiry.end_reason(one, now) for one in expired})
        if not self._waiting:
            return
        for request in self._expiry.unfinishable(self._waiting, now):
            self._drop(request, self._expiry.end_reason(request, now))
        floor = now + self._limits.min_start_budget_s
        for request in [one for one in self._waiting if one.deadline <= floor]:
            self._drop(request, TOO_LATE_TO_START)

    def _next_prompt_tokens(self) -> int:
        """Most prompt tokens that the next step may carry, as far as is known here."""
        begun = [one for one in self._running.values() if one.first_token_at is None]
        tokens = sum(one.prompt_tokens for one in itertools.chain(begun, self._waiting))
        return min(tokens, self._config.max_step_tokens)

    def _admit(self, now: float) -> None:
        for request in [one for one in self._waiting if not (one.compiling or one.held_back)]:
            if len(self._running) + len(self._leaving) >= self._config.max_running:
                return
            job, handle = request.job, next(self._handles)
            try:
                self._backend.add(handle, job, request.limit_tokens - request.prompt_tokens)
            except RequestError as error:
                self._drop(request, refused(error.code, str(error)))
                continue
            except Exception as error:
                # One job that breaks the engine's ``add`` is no reason to end those of others. The
                # message is not logged, since it may quote the job.
                at, what = extract_tb(error.__traceback__)[-1], type(error).__name__
                where = f"{at.filename}:{at.lineno}"
                engine_log.error("the engine could not take up a job: %s at %s", what, where)
                self._backend.abort([handle])
                self._drop(request, NOT_TAKEN)
                continue
            self._waiting.remove(request)
            self._running[handle] = request
            request.slot = handle
            # It may have been submitted since the step began, which is what ``now`` says.
            request.started_at = max(now, request.submitted_at)
            job.has_started = True
            self._stats_due = True
            self._events.append(JobStarted(job, (request.started_at - request.submitted_at) * 1e3))

    def _compute(self) -> None:
        """Have the backend do one step, and apply its results."""
        if self._backend_began is None:
            self._backend_began = self._clock()
            self._prompt_tokens_seen = self._backend.load().prompt_tokens_total
        rows = len(self._running)
        wait_s = MIN_WAIT_S if any(map(self._is_held, self._leaving)) else 0.0
        produced = self._backend.step(self._patience_s() if rows else wait_s)
        now = self._clock()
        for request in [one for one in self._leaving if not self._is_held(one)]:
            self._told(request, self._leaving.pop(request).why)
        if any(one.ids or one.end or one.prompt for one in produced):
            self._measure(now - self._backend_began, rows, produced)
            self._backend_began = now
        for one in produced:
            found = self._running.get(one.handle)
            if found is not None:  # else it was given up
                self._apply(one, found, now)
        if not self._running:
            self._backend_began = None

    def _is_held(self, request: Request) -> bool:
        """Whether the memory of a job that leaves is not free yet, and may be waited for."""
        has_time = self._clock() < self._leaving[request].since + LONGEST_LEAVE_S
        return has_time and self._backend.holds(request.slot)

    def _patience_s(self) -> float:
        """Seconds until the next deadline, ``MIN_WAIT_S`` to ``MAX_WAIT_S``."""
        now = self._clock()
        slow_s = self._step_time.slow_step_s(0)
        nearest = now + MAX_WAIT_S
        held = self._running.values(), self._pauses.paused.values(), self._waiting
        for request in itertools.chain(*held):
            early_s = slow_s if request.ends_cleanly else 0.0
            nearest = min(nearest, request.deadline - early_s)
        return max(MIN_WAIT_S, nearest - now)

    def _measure(self, duration_s: float, rows: int, produced: Sequence[Produced]) -> None:
        read = self._backend.load().prompt_tokens_total
        prompt_tokens = max(0, read - self._prompt_tokens_seen)
        self._prompt_tokens_seen = read
        most = max(len(one.ids) for one in produced)
        if most:
            self._step_time.decoded(duration_s, most, rows=rows, prompt_tokens=prompt_tokens)
        self._step_time.prefilled(duration_s, prompt_tokens)
        self._totals.count_step(duration_s, prompt_tokens)

    def _apply(self, made: Produced, request: Request, now: float) -> None:
        """Count and publish a step's results for a job, unless the job was to stop meanwhile."""
        job = request.job
        if job.abort is not None or now >= job.deadline:
            why = self._expiry.end_reason(request, now)
            if why.reason is not FinishReason.STOP:
                request.late_tokens += len(made.ids)
                self._totals.late_tokens += len(made.ids)
            self._end(made, request, why)
            return
        if made.cached_tokens:
            self._totals.cached_tokens += made.cached_tokens - request.cached_tokens
            request.cached_tokens = made.cached_tokens
        if made.prompt is not None:
            self._events.append(JobPrompt(job, made.prompt))
        end_reason = _own_end(made)
        ids, logprobs = list(made.ids), made.logprobs
        if ids and (end_reason is None or end_reason.code is None):
            if request.first_token_at is None:
                request.first_token_at = now
            room = request.limit_tokens - len(request.tokens)
            kept = next((i for i, one in enumerate(ids, 1) if one in request.end_ids), 0)
            if kept and kept <= room:
                ids, end_reason = ids[:kept], STOPPED
            elif len(ids) >= room:
                ids, end_reason = ids[:room], end_reason or LENGTH
            if job.sampling.max_tokens:
                request.tokens += ids
                request.least_tokens = max(0, request.least_tokens - len(ids))
                self._totals.tokens += len(ids)
                self._events.append(JobTokens(job, ids, logprobs and logprobs[: len(ids)]))
        if end_reason is not None:
            if end_reason.code is None and request.generated:
                self._step_time.answered(request.generated)
            self._end(made, request, end_reason)

    # ── endings ──────────────────────────────────────────────────────────────────────────────

    def _end(self, made: Produced, request: Request, why: EndReason) -> None:
        """End a job after a step: at once where the backend itself has ended it."""
        if made.end is None:
            self._give_up({request: why})
        else:
            del self._running[request.slot]
            self._told(request, why)

    def _give_up(self, ends: dict[Request, EndReason]) -> None:
        """Have the backend drop running jobs; they end now or when its next step returns."""
        self._backend.abort([request.slot for request in ends])
        for request, why in ends.items():
            is_paused = self._pauses.paused.pop(request.slot, None) is not None
            self._running.pop(request.slot, None)
            if is_paused or self._config.frees_at_once:
                self._told(request, why)
            else:
                self._leaving[request] = _Leave(why, self._clock())

    def _drop(self, request: Request, why: EndReason) -> None:
        """End a waiting job."""
        self._waiting.remove(request)
        self._told(request, why)

    def _told(self, request: Request, why: EndReason) -> None:
        """Queue the last event of a job that is held nowhere any more."""
        self._stats_due = True
        self._events.append(self._record(request, why))

    def _record(self, request: Request, why: EndReason) -> JobFinished:
        if request.job.constraint is not None:
            request.job.constraint.drop()
        return finished(request, why, self._clock())

    def _shut_down(self) -> None:
        """End all remaining jobs and release the backend. Idempotent."""
        with self._wake:
            if self._stopped:
                return
            self._stopped = True
            inbox = list(self._inbox)
            self._inbox.clear()
        if not self._has_failed:
            self._close()
        paused = self._pauses.paused
        held = [*self._running.values(), *paused.values(), *self._waiting, *inbox]
        why = {one: loss_of(one.job) if self._has_failed else DRAINED for one in held}
        why |= {one: leave.why for one, leave in self._leaving.items()}
        for request, end in why.items():
            self._told(request, end)
        for jobs in (self._running, paused, self._waiting, self._leaving):
            jobs.clear()
        self._stats = self._snapshot(NO_LOAD)
        self._publish(self._take_events())
        if self._has_failed:  # last: what has failed may hang as it is closed
            self._close()

    def _close(self) -> None:
        try:
            if begun := [*self._running, *self._pauses.paused]:
                self._backend.abort(begun)
            self._backend.close()
        except Exception:
            engine_log.exception("the engine could not be closed; its process must end")

    def _publish(self, events: list[Event]) -> None:
        if events and self._sink is not None and self._stats_due and not self._stopped:
            # Whoever hears of an end must not count its job by older statistics.
            self._stats = self._snapshot()
        super()._publish(events)

    def _snapshot(self, load: BackendLoad | None = None) -> WorkerStats:
        self._stats_due = False
        return snapshot(
            load or self._backend.load(),
            self._totals,
            self._step_time,
            held=len(self._running) + len(self._leaving),
            waiting=len(self._waiting),
            check_us=self._expiry.check_us,
        )


def _own_end(made: Produced) -> EndReason | None:
    """Why the backend ended a job by its own rules; None if it did not."""
    match made.end:
        case None:
            return None
        case FinishReason.STOP:
            return STOPPED
        case FinishReason.LENGTH:
            return LENGTH
        case _:
            return refused(made.code or Code.ENGINE_ERROR, made.message)
