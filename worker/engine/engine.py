"""The engine: one thread that turns jobs into tokens, a step at a time.

::

    any thread      submit ─▶ inbox          cancel ─▶ job.abort (a plain flag)
                                │                          │
    engine thread   ┌───────────▼──────────────────────────▼───────────────────────────┐
                    │ look → take commands → schedule → execute → look, apply          │ ─▶ sink
                    └──────────────────────────── one step ────────────────────────────┘
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from secrets import randbits

from worker.engine.cache_journal import CacheJournal
from worker.engine.core import (
    Clock,
    EngineStats,
    Event,
    EventSink,
    Job,
    JobFinished,
    JobStarted,
    JobTokens,
)
from worker.engine.lookout import Lookout
from worker.engine.records import finished
from worker.engine.request import (
    ABORTED,
    DRAINED,
    LENGTH,
    STARVED,
    STOPPED,
    Ending,
    Request,
    make_request,
)
from worker.engine.runner import Plan, Runner, StepResult
from worker.engine.scheduler import Scheduler
from worker.engine.totals import Totals, snapshot
from worker.kv.tier import NoTier, Tier
from worker.log import engine_log
from worker.protocol import AbortCause, CacheReport, Code, FinishReason, TokenLogprob, prefix_salt

IDLE_CHECK_S = 1.0
"""Once idle for so long, the books are checked: nobody waits for it then."""
STALLED_S = 0.005
"""Cancels and deadlines are looked at so often while nothing can be computed."""


class Engine:
    """An ``EngineService`` over a scheduler and a runner.

    ``start`` runs it on a thread of its own; tests and simulators call ``step`` instead.
    ``hash_salt`` is the card's. ``clock`` is monotonic seconds, ``draw_seed`` gives 64 random bits
    for a job without a seed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        eos_token_ids: Collection[int],
        *,
        tier: Tier | None = None,
        hash_salt: bytes = b"",
        clock: Clock = time.monotonic,
        draw_seed: Callable[[], int] = lambda: randbits(64),
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._eos = frozenset(eos_token_ids)
        self._clock = clock
        self._draw_seed = draw_seed
        self._tier: Tier = tier or NoTier()
        self._hash_salt = hash_salt
        self._pace = scheduler.pace
        self._lookout = Lookout(clock, self._pace)
        self._inbox: deque[Request] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._stalled = False
        """Requests wait, and nothing can be computed until something comes back from disk."""
        self._thread: threading.Thread | None = None
        self._sink: EventSink | None = None
        self._journal = CacheJournal(scheduler.pool)
        self._totals = Totals()
        self._tier.attach(self._notify)
        self._stats = snapshot(scheduler, self._lookout, self._totals, self._tier.stats())

    # ── the surface: any thread ──────────────────────────────────────────────────────────────

    def start(self, sink: EventSink) -> None:
        """Start the engine's thread; ``sink`` is called on it and slows it down by blocking."""
        if self._thread is not None or self._stopped:
            raise RuntimeError("an engine starts once; build another one")
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="tidegate-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. After ``stop`` its refusal reaches the sink on the caller's thread."""
        request = make_request(job, submitted_at=self._clock(), own_seed=self._draw_seed())
        if request.prompt_tokens < self.scheduler.capacity_tokens:
            self.scheduler.prefixes.label(request, prefix_salt(self._hash_salt, job.cache_salt))
        with self._wake:
            if not self._stopped:
                self._inbox.append(request)
                self._wake.notify()
                return
        self._publish([self._record(request, DRAINED)])

    def cancel(self, job: Job, cause: AbortCause) -> None:
        """Stop a job within one step. Idempotent; the first cause wins."""
        # No need to wake the thread: it sleeps only when it has no job at all.
        with self._wake:
            if job.abort is None:
                job.aborted_at = self._clock()
                job.abort = cause

    def stats(self) -> EngineStats:
        """The state after the latest step."""
        return self._stats

    def cache_reports(self) -> list[CacheReport]:
        """See ``EngineService``."""
        return self._journal.take()

    def stop(self) -> None:
        """Abort what runs, release everything, end the thread. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is None:
            self._shut_down()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # ── the loop: the engine's thread ────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._publish(self.step())
        except Exception:
            engine_log.exception("the engine broke; it ends all of its jobs and takes no more")
        finally:
            self._shut_down()

    def _wait_for_work(self) -> bool:
        """Sleep until there is a job; False when it is time to stop."""
        with self._wake:
            if self._stalled:
                self._wake.wait_for(self._has_news, STALLED_S)
            elif not self.scheduler.has_work and not self._wake.wait_for(
                self._has_news, IDLE_CHECK_S
            ):
                self.scheduler.check_integrity()
                self._wake.wait_for(self._has_news)
            return not self._stopping

    def _has_news(self) -> bool:
        return self._stopping or bool(self._inbox) or self._tier.has_results

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def step(self) -> list[Event]:
        """Do one step and return what happened, per job in order."""
        events: list[Event] = []
        now = self._clock()
        self._tier.collect(now)
        self._look(now, events)
        self._take_commands(now, events)
        plan = self._schedule(now, events)
        if plan is not None:
            result = self._execute(plan, events)
            if result is not None:
                self._apply(plan, result, events)
        self._stalled = plan is None and self.scheduler.has_work
        self._tier.spill()
        self._journal.publish()
        self._stats = snapshot(self.scheduler, self._lookout, self._totals, self._tier.stats())
        return events

    def _look(self, now: float, events: list[Event]) -> None:
        """End whom deadline or abort has caught up with: blocks are free before the next step."""
        for request in self._lookout.due(self.scheduler.running, now):
            self._finish(request, self._lookout.verdict(request, now), events)
        for request in [r for r in self.scheduler.waiting if r.job.abort is not None]:
            self._finish(request, self._lookout.verdict(request, now), events)
        for request in self.scheduler.starved(now):
            self._finish(request, STARVED, events)

    def _take_commands(self, now: float, events: list[Event]) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            self._totals.jobs += 1
            if (cause := request.job.abort) is not None:
                events.append(self._record(request, ABORTED[cause]))
            elif (refusal := self.scheduler.enqueue(request, now)) is not None:
                events.append(self._record(request, refusal))
            else:
                self._tier.restore(request, now)

    def _schedule(self, now: float, events: list[Event]) -> Plan | None:
        schedule = self.scheduler.schedule()
        for request in schedule.started:
            request.started_at = now
            events.append(JobStarted(request.job, (now - request.submitted_at) * 1e3))
        return schedule.plan

    def _execute(self, plan: Plan, events: list[Event]) -> StepResult | None:
        """Compute the plan; None when the runner failed and the plan's jobs were ended."""
        started = self._clock()
        try:
            result = self._runner.execute(plan)
            if len(result.ids) != len(plan.rows):
                raise RuntimeError(f"{len(result.ids)} results for {len(plan.rows)} rows")
        except Exception as error:
            engine_log.exception("a step of %d rows failed", len(plan.rows))
            failed = Ending(
                FinishReason.ERROR,
                Code.ENGINE_ERROR,
                f"the engine failed in a step ({type(error).__name__}); its log has the details",
            )
            for row in plan.rows:
                self._finish(row.request, failed, events)
            return None
        self._measure(plan, result, self._clock() - started)
        return result

    def _measure(self, plan: Plan, result: StepResult, duration_s: float) -> None:
        prompt_tokens = plan.tokens - plan.decodes
        most = max(map(len, result.ids))
        if most:
            self._pace.decoded(duration_s, most)
        self._pace.prefilled(duration_s, prompt_tokens)
        self._totals.steps += 1
        self._totals.busy_s += duration_s
        self._totals.prompt_tokens += prompt_tokens

    def _apply(self, plan: Plan, result: StepResult, events: list[Event]) -> None:
        """Count and publish the new tokens, except those of jobs that were to stop meanwhile."""
        now = self._clock()
        logprobs = result.logprobs or [None] * len(plan.rows)
        for row, ids, row_logprobs in zip(plan.rows, result.ids, logprobs, strict=True):
            request = row.request
            job = request.job
            if job.abort is not None or now >= job.deadline:
                if job.abort is not AbortCause.STOP_STRING:
                    request.late_tokens = len(ids)
                    self._totals.late_tokens += len(ids)
                self._finish(request, self._lookout.verdict(request, now), events)
                continue
            if not ids:
                self.scheduler.advance(row, ids)
                continue
            ending = None
            if not self._eos.isdisjoint(ids) and not job.sampling.ignore_eos:
                ids, row_logprobs = self._cut_after_eos(ids, row_logprobs)
                ending = STOPPED
            self.scheduler.advance(row, ids)
            if request.first_token_at is None:
                request.first_token_at = now
            self._totals.tokens += len(ids)
            events.append(JobTokens(job, ids, row_logprobs))
            if ending is None and len(request.tokens) >= request.limit_tokens:
                ending = LENGTH
            if ending is not None:
                self._pace.answered(request.generated)
                self._finish(request, ending, events)

    def _cut_after_eos(
        self, ids: list[int], logprobs: list[TokenLogprob] | None
    ) -> tuple[list[int], list[TokenLogprob] | None]:
        end = next(i for i, token in enumerate(ids, 1) if token in self._eos)
        return ids[:end], logprobs and logprobs[:end]

    def _publish(self, events: list[Event]) -> None:
        if events and self._sink is not None:
            try:
                self._sink(events)
            except Exception:
                engine_log.exception("the sink failed; %d events are lost", len(events))

    # ── endings ──────────────────────────────────────────────────────────────────────────────

    def _finish(self, request: Request, ending: Ending, events: list[Event]) -> None:
        if request.slot >= 0:
            self._tier.keep(request)
        self.scheduler.release(request)
        events.append(self._record(request, ending))

    def _record(self, request: Request, ending: Ending) -> JobFinished:
        return finished(request, ending, self._clock())

    def _shut_down(self) -> None:
        """End every job that is left and release the runner. Idempotent."""
        with self._wake:
            self._stopped = True
            inbox = list(self._inbox)
            self._inbox.clear()
        events: list[Event] = [self._record(request, DRAINED) for request in inbox]
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, DRAINED, events)
        self._publish(events)
        self._tier.close()
        self._runner.close()
        self._stats = snapshot(self.scheduler, self._lookout, self._totals, self._tier.stats())
