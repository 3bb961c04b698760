"""A worker as a model: continuous batching at a pace of ``step + row · rows + prompt · tokens``.

It does what the real engine does, in the same order: running requests first, chunked prefill within
a budget of tokens per step, admission by least slack where slot and KV room are free, deadlines
looked at between steps. Steps in which nothing changes are taken together, up to the next change.
"""

import asyncio
import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.clock import Clock, Timer
from orchestrator.lanes import JobSink, Lane, LaneConfig, LaneOwner
from worker.protocol import (
    AbortCause,
    Code,
    Delta,
    End,
    FinishReason,
    Frame,
    ModelCard,
    OnDeadline,
    Sampling,
    Started,
    WorkerStats,
)
from worker.runner.synthetic import StepCost
from worker.scheduler.prompt_order import prompt_urgency

HEARTBEAT_S = 0.25
_STEPS_TOLD = 4
"""News of tokens is bundled over so many steps at most: real workers tell every one."""
_WIRE_S = 0.001
"""From the orchestrator to the engine's inbox."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """``noise`` is the spread of a step's time (sigma of its logarithm).

    Prompts delay a step with decodes by ``max_stall_s`` at most, as the real engine's scheduler
    sees to. News take ``way_back_s`` on average to the orchestrator, in order.
    """

    pace: StepCost
    slots: int
    kv_tokens: int
    step_tokens: int = 512
    min_start_s: float = 0.1
    noise: float = 0.03
    max_stall_s: float = 0.05
    way_back_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    lane: "SimLane"
    handle: int
    prompt: int
    most: int
    length: int
    least: int
    deadline: float
    on_deadline: OnDeadline
    submitted: float
    computed: int = 0
    made: int = 0
    told: int = 0
    started: float = -1.0
    first: float = -1.0
    gap_s: float = math.inf
    first_by: float = math.inf
    wants_pause: bool = False
    keeps_on: bool = False
    spared: bool = False
    abort: AbortCause | None = None
    aborted: float = 0.0


class _Segment(NamedTuple):
    """Steps of one kind, back to back."""

    began: float
    step_s: float
    steps: int
    prompts: dict[_Job, int]


class SimWorker:
    """One instance. ``pace`` may be replaced while it runs; ``stalled`` stops it like SIGSTOP."""

    def __init__(self, spec: WorkerSpec, card: ModelCard, clock: Clock, rng: random.Random) -> None:
        self.pace = spec.pace
        self.card = card
        self.tokens_late = 0
        self.started_late = 0
        """Jobs that came when their deadline was past already: a dispatch that should not be."""
        self._spec = spec
        self._clock = clock
        self._rng = rng
        self._lanes: list[SimLane] = []
        self._running: list[_Job] = []
        self._waiting: list[_Job] = []
        self._paused: list[_Job] = []
        self._segment: _Segment | None = None
        self._timer: Timer | None = None
        self._kv_used = 0
        self._steps = self._tokens = self._prompts = self._jobs = 0
        self._busy_ms = self._step_ms = self._typical = 0.0

    # ── what lanes want ──────────────────────────────────────────────────────────────────────

    def attach(self, lane: "SimLane") -> None:
        self._lanes.append(lane)

    def submit(self, job: _Job) -> None:
        self._jobs += 1
        now = self._clock.now()
        if job.deadline - now <= self._spec.min_start_s:
            self.started_late += job.deadline <= now
            self._end(job, FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
            return
        self._waiting.append(job)
        self._interrupt()

    def cancel(self, job: _Job, cause: AbortCause) -> None:
        if job.abort is None:
            job.abort, job.aborted = cause, self._clock.now()
            self._interrupt()

    def pause(self, job: _Job, *, wanted: bool) -> None:
        if job.wants_pause is not wanted:
            job.wants_pause = wanted
            self._interrupt()

    def way_back_s(self) -> float:
        """How long the next news will be on their way."""
        mean_s = self._spec.way_back_s
        return mean_s * (0.5 + self._rng.expovariate(2.0)) if mean_s else 0.0

    def stats(self) -> WorkerStats:
        total = self._spec.kv_tokens // self.card.block_tokens
        free = (self._spec.kv_tokens - self._kv_used) // self.card.block_tokens
        return WorkerStats(
            kv_blocks_total=total,
            kv_blocks_used=total - free,
            kv_blocks_free=free,
            running=len(self._running),
            waiting=len(self._waiting),
            step_ms=self._step_ms,
            prefill_tokens_per_s=0.0,
            tokens_total=self._tokens,
            late_tokens_total=0,
            jobs_total=self._jobs,
            check_us=0.0,
            steps_total=self._steps,
            busy_ms_total=self._busy_ms,
            prefill_tokens_total=self._prompts,
            paused=len(self._paused),
        )

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def _interrupt(self) -> None:
        """Something changed: look at it after the step that is under way."""
        segment = self._segment
        if segment is None:
            self._begin()
            return
        done = int((self._clock.now() - segment.began) / segment.step_s) + 1
        if done < segment.steps:
            assert self._timer is not None
            self._timer.cancel()
            self._schedule(segment._replace(steps=done))

    def _schedule(self, segment: _Segment) -> None:
        self._segment = segment
        end = segment.began + segment.steps * segment.step_s
        self._timer = self._clock.call_at(end, self._step_over)

    def _begin(self) -> None:
        now = self._clock.now()
        self._look(now)
        self._set_aside()
        self._admit(now)
        self._segment = None
        if not self._running:
            return
        decodes = sum(job.computed >= job.prompt for job in self._running)
        budget, prompts = self._spec.step_tokens - decodes, dict[_Job, int]()
        if decodes:
            budget = min(budget, int(self._spec.max_stall_s / self.pace.prompt_token_s))
        for job in self._prompts_in_order(now):
            chunk = min(job.prompt - job.computed, budget)
            if chunk > 0:
                prompts[job] = chunk
                budget -= chunk
        pace = self.pace
        rows = decodes + len(prompts)
        step_s = pace.step_s + pace.row_s * rows + pace.prompt_token_s * sum(prompts.values())
        step_s *= self._rng.lognormvariate(0.0, self._spec.noise)
        steps = 1
        if not prompts and not any(job.gap_s < math.inf for job in self._running):
            left = min(job.length - job.made for job in self._running)
            until = min(job.deadline for job in self._running) - now
            steps = max(1, min(left, int(until / step_s) + 1, _STEPS_TOLD))
        self._schedule(_Segment(now, step_s, steps, prompts))

    def _prompts_in_order(self, now: float) -> list[_Job]:
        pace = self.pace
        computing = [job for job in self._running if job.computed < job.prompt]
        left_s = {job: (job.prompt - job.computed) * pace.prompt_token_s for job in computing}
        backlog_s = sum(left_s.values())
        answer_s = self._typical * (pace.step_s + pace.row_s * self._spec.slots)

        def urgency(job: _Job) -> float:
            whole_s = job.deadline - now - answer_s
            slack_s = min(whole_s, job.first_by - now) - left_s[job]
            return prompt_urgency(slack_s, left_s[job], backlog_s)

        return sorted(computing, key=urgency, reverse=True)

    def _step_over(self) -> None:
        segment = self._segment
        assert segment is not None
        now = self._clock.now()
        steps = segment.steps
        self._steps += steps
        self._busy_ms += 1000 * segment.step_s * steps
        self._step_ms = 1000 * segment.step_s
        self._prompts += sum(segment.prompts.values())
        for job in list(self._running):
            if job in segment.prompts:
                job.computed += segment.prompts[job]
                if job.computed < job.prompt:
                    continue
                made = 1
            elif job.computed < job.prompt:
                continue
            else:
                made = steps
            if job.abort is not None or now >= job.deadline:
                self.tokens_late += 1
                made -= 1  # the last step's token came too late
            if not made:
                continue
            job.made += made
            self._tokens += made
            if job.first < 0:
                job.first = now
            self._tell(job)
            if job.made >= job.length:
                known = self._typical or job.made
                self._typical = known + (job.made - known) / 16
                whole = job.made >= job.most
                self._leave(job, FinishReason.LENGTH if whole else FinishReason.STOP, None)
        self._begin()

    def _look(self, now: float) -> None:
        fastest_s = self.pace.step_s + self.pace.row_s
        for job in list(self._running):
            certain_s = max(0, job.least - job.made) * fastest_s
            cleanly = job.on_deadline is not OnDeadline.ERROR
            ready_by = now + (1.5 * self._step_ms / 1000 if cleanly else certain_s)
            if job.abort is not None:
                self._leave(job, FinishReason.CANCELLED, Code.CANCELLED)
            elif cleanly and ready_by >= job.deadline:
                self._leave(job, FinishReason.DEADLINE, None)
            elif ready_by >= job.deadline:
                if job.keeps_on and now < job.deadline:
                    job.spared, job.least = True, 0
                    continue
                self._leave(job, FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
        for job in list(self._paused):
            if job.abort is not None or now >= job.deadline:
                self._paused.remove(job)
                self._running.append(job)
                aborted = job.abort is not None
                code: Code | None = Code.CANCELLED if aborted else Code.DEADLINE_EXCEEDED
                if not aborted and job.on_deadline is not OnDeadline.ERROR:
                    code = None
                reason = FinishReason.CANCELLED if aborted else FinishReason.DEADLINE
                self._leave(job, reason, code)
        for job in list(self._waiting):
            if job.abort is not None:
                self._waiting.remove(job)
                self._end(job, FinishReason.CANCELLED, Code.CANCELLED)
            elif job.deadline - now <= self._spec.min_start_s:
                self._waiting.remove(job)
                self._end(job, FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)

    def _set_aside(self) -> None:
        for job in [job for job in self._running if job.wants_pause]:
            self._running.remove(job)
            self._paused.append(job)
            self._tell(job)
        for job in [job for job in self._paused if not job.wants_pause]:
            if len(self._running) < self._spec.slots:
                self._paused.remove(job)
                self._running.append(job)

    def _admit(self, now: float) -> None:
        self._waiting.sort(key=lambda job: (job.deadline, job.submitted))
        while len(self._running) < self._spec.slots:
            job = next((job for job in self._waiting if not job.wants_pause), None)
            if job is None:
                return
            if self._kv_used + job.prompt + job.most > self._spec.kv_tokens:
                return
            self._waiting.remove(job)
            self._kv_used += job.prompt + job.most
            job.started = now
            self._running.append(job)
            wait_ms = 1000 * (now - job.submitted)
            job.lane.deliver(Frame(0, started=[Started(job.handle, wait_ms)]))

    def _leave(self, job: _Job, reason: FinishReason, code: Code | None) -> None:
        self._running.remove(job)
        self._kv_used -= job.prompt + job.most
        self._tell(job)
        self._end(job, reason, code)

    def _tell(self, job: _Job) -> None:
        """Its tokens since it was last told of."""
        count = job.made - job.told
        if count:
            job.told = job.made
            job.lane.deliver(Frame(0, deltas=[Delta(job.handle, [1] * count, [""] * count)]))

    def _end(self, job: _Job, reason: FinishReason, code: Code | None) -> None:
        now = self._clock.now()
        started = job.started if job.started >= 0 else now
        first = job.first if job.first >= 0 else now
        job.lane.finish(
            End(
                job.handle,
                reason,
                job.prompt,
                job.made,
                wait_ms=1000 * (started - job.submitted),
                prefill_ms=1000 * (first - started),
                decode_ms=1000 * (now - first),
                left_ms=1000 * (job.deadline - now),
                code=code,
                abort_ms=None if job.abort is None else 1000 * (now - job.aborted),
                spared=job.spared,
            )
        )


class SimLane(Lane):
    """The orchestrator's end of a lane to a ``SimWorker``, without a wire."""

    def __init__(
        self,
        worker: SimWorker,
        address: str,
        config: LaneConfig,
        owner: LaneOwner,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__(address, owner, clock)
        self._worker = worker
        self._sim_jobs: dict[int, _Job] = {}
        self._beat: Timer | None = None
        self._last_news_at = 0.0
        worker.attach(self)

    def start(self) -> None:
        self.is_open = True
        self.sessions_total += 1
        stats = self._worker.stats()
        self._owner.lane_opened(self, Frame(0, stats=stats, card=self._worker.card))
        self._beat = self._clock.call_at(self._clock.now() + HEARTBEAT_S, self._heartbeat)

    def break_off(self, reason: str) -> None:
        """It never goes silent while its worker lives."""

    def reopen(self) -> None:
        """Its worker's model is never loaded anew."""

    def describe(self) -> None:
        """The card came with the first frame, and there is no prefix cache."""

    def probe(self) -> None:
        """What is sent here always arrives."""

    async def close(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self.is_open = False
        await asyncio.sleep(0)

    def submit(
        self,
        sink: JobSink,
        *,
        token_ids: list[int],
        sampling: Sampling,
        budget_ms: float,
        deadline_unix_ms: int,
        on_deadline: OnDeadline,
        correlation_id: str,
        cache_salt: str = "",
        session: str = "",
        first_token_budget_ms: float | None = None,
        token_gap_ms: float | None = None,
        keeps_on: bool = False,
    ) -> int:
        """As the real lane's. The first token id is how long the answer is by itself."""
        handle = self._add_job(sink)
        now = self._clock.now()
        job = _Job(
            lane=self,
            handle=handle,
            prompt=len(token_ids),
            most=sampling.max_tokens,
            length=sampling.max_tokens
            if sampling.ignore_eos
            else min(token_ids[0], sampling.max_tokens),
            least=sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens,
            deadline=now + budget_ms / 1000,
            on_deadline=on_deadline,
            keeps_on=keeps_on,
            submitted=now + _WIRE_S,
            gap_s=math.inf if token_gap_ms is None else token_gap_ms / 1000,
            first_by=math.inf
            if first_token_budget_ms is None
            else now + first_token_budget_ms / 1000,
        )
        self._sim_jobs[handle] = job
        self._clock.call_at(now + _WIRE_S, lambda: self._worker.submit(job))
        return handle

    def cancel(self, handle: int, cause: AbortCause) -> None:
        job = self._sim_jobs.get(handle)
        if job is not None:
            now = self._clock.now()
            self._clock.call_at(now + _WIRE_S, lambda: self._worker.cancel(job, cause))

    def pause(self, handle: int) -> None:
        self._want_pause(handle, wanted=True)

    def resume(self, handle: int) -> None:
        self._want_pause(handle, wanted=False)

    def _want_pause(self, handle: int, *, wanted: bool) -> None:
        job = self._sim_jobs.get(handle)
        if job is not None:
            at = self._clock.now() + _WIRE_S
            self._clock.call_at(at, lambda: self._worker.pause(job, wanted=wanted))

    def deliver(self, frame: Frame) -> None:
        """News of jobs, as the reader would hand them out."""
        now = self._clock.now()
        way_s = self._worker.way_back_s()
        if not way_s:
            self._take(frame)
            return
        self._last_news_at = max(self._last_news_at, now + way_s)
        self._clock.call_at(self._last_news_at, lambda: self._take(frame))

    def _take(self, frame: Frame) -> None:
        now = self._clock.now()
        self.last_frame_at = now
        self._dispatch(frame, now)

    def finish(self, end: End) -> None:
        self._sim_jobs.pop(end.handle, None)
        self.deliver(Frame(0, ends=[end]))

    def _heartbeat(self) -> None:
        now = self._clock.now()
        self.last_frame_at = now
        self._beat = self._clock.call_at(now + HEARTBEAT_S, self._heartbeat)
        self._owner.lane_reported(self, Frame(0, stats=self._worker.stats()))
