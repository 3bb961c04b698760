"""A ``Backend`` over a third-party engine, which batches, computes and samples by itself.

::

    waiting ──add──▶ running ──the engine's own end──────────▶ ended
       │             │  ▲ └──abort──▶ leaving ──the next step────▶ ended
       │             └▶ paused ──abort──────────────────────────▶ ended
       └─────────────────abort──────────────────────────────────▶ ended

A leaving job keeps its slot until its blocks are free; with some engines that is when the next step
returns, or later. Its end is published only then, or after ``LONGEST_LEAVE_S``.
"""

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Final, Protocol

from protocol import Code, FinishReason, KvReport, ModelCard, PromptLogprobs, TokenLogprob
from worker.core import Clock, Job
from worker.engine.backend import Backend, Executed
from worker.engine.kv_events import KvEvents
from worker.errors import RequestError
from worker.log import engine_log
from worker.scheduler.end_reason import LENGTH, STOPPED, EndReason, failed
from worker.scheduler.plan import Plan, Row, Schedule, StepResult
from worker.scheduler.request import Request
from worker.scheduler.roster import Roster

MIN_WAIT_S: Final = 0.001
LONGEST_LEAVE_S: Final = 0.25
"""Seconds after which an aborted job ends even if the engine still holds its memory."""
NOT_TAKEN: Final = failed(
    Code.ENGINE_ERROR, "the engine could not take up this request; the worker's log says why"
)


@dataclass(slots=True)
class Produced:
    """The output of one step for one job. ``ids`` includes the end token if one ended the job."""

    handle: int
    ids: Sequence[int] = ()
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities parallel to ``ids``, if the job asks for them."""
    prompt: PromptLogprobs | None = None
    end: FinishReason | None = None
    """``STOP`` or ``LENGTH`` if the engine's own rules ended the job, ``ERROR`` if it failed."""
    code: Code | None = None
    """Why the job failed, with ``ERROR``; ``message`` is for people."""
    message: str = ""
    cached_tokens: int = 0
    """Prompt tokens found in the cache; set with a job's first tokens."""


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """A core's state between two steps. Blocks are KV blocks of the card's ``block_tokens``."""

    kv_blocks_total: int
    kv_blocks_used: int
    running: int
    waiting: int
    kv_blocks_cached: int = 0
    hit_blocks_total: int = 0
    missed_blocks_total: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens computed, not counting those found in the cache."""


class StepCore(Protocol):
    """The core of a third-party engine. All methods except ``interrupt`` and ``has_failed`` are
    called only on the engine's thread, between steps."""

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        """Accept a job of at most ``max_tokens`` new tokens; it fits the context with its prompt.

        Raises ``RequestError`` if the core does not support the job; it has not accepted it then.
        """

    def abort(self, handles: Collection[int]) -> None:
        """Abort jobs. They produce no more tokens. Their blocks are free by the time the next
        ``step`` returns, unless ``holds`` says otherwise. Unknown handles are ignored."""

    def holds(self, handle: int) -> bool:
        """Whether an aborted job still holds memory one or more steps after ``abort``."""

    def pause(self, handle: int) -> bool:
        """Stop computing a job, and let other jobs use its memory. False if that is not possible
        now: ask again after the next step. ``abort`` also ends a paused job."""

    def resume(self, handle: int) -> None:
        """Continue a job after its latest token. There is a slot for it. Does nothing for a job
        that was not paused."""

    def step(self, wait_s: float) -> Sequence[Produced]:
        """Do at most one step, and return its output.

        Empty after ``wait_s`` without a step. Raises errors that make the core unusable, such as
        ``DeviceLost``.
        """

    def interrupt(self) -> None:
        """Wake a waiting ``step``, or the next one. May do nothing if ``step`` does not wait. Any
        thread."""

    @property
    def has_failed(self) -> bool:
        """Whether it can no longer compute even if no ``step`` has raised, for example because one
        of its processes has ended. Any thread."""

    def load(self) -> CoreLoad:
        """The core's load; called several times per step."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class SteppedBackend(Backend):
    """Starts jobs on a ``StepCore``, least slack first, and tracks their memory."""

    def __init__(
        self,
        core: StepCore,
        card: ModelCard,
        *,
        frees_at_once: bool,
        kv_events: KvEvents | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """The limits come from the ``card``. ``frees_at_once``: ``StepCore.abort`` frees a job's
        memory at once, not only after the next step. ``kv_events`` has the changes of
        the core's prefix cache."""
        self.core = core
        self.can_pause = card.can_pause
        self._card = card
        self._frees_at_once = frees_at_once
        self._clock = clock
        self._kv_events = kv_events
        self.roster = Roster(
            capacity_tokens=card.context_tokens,
            context_tokens=max(card.context_tokens, card.full_context_tokens),
            vocab_size=card.vocab_size,
            max_held=card.max_running + card.max_waiting,
            min_start_budget_s=card.min_start_budget_ms / 1e3,
            lacks=card.lacks,
        )
        self._handles = itertools.count(1)
        self._by_handle: dict[int, Request] = {}
        """Running and paused jobs, each with its handle as its slot."""
        self.steps_in_flight = int(not frees_at_once)
        self._began: float | None = None
        """Clock time at which the core's step began; None while it has no work."""
        self._prompt_tokens_seen = 0
        self._cached_tokens = 0
        self._is_closed = False

    # ── any thread ───────────────────────────────────────────────────────────────────────────

    def interrupt(self) -> None:
        self.core.interrupt()

    def kv_report(self) -> KvReport | None:
        return None if self._kv_events is None else self._kv_events.take()

    @property
    def has_failed(self) -> bool:
        return self.core.has_failed

    @property
    def largest_step_tokens(self) -> int:
        # Some engines process whole prompts in one step, despite the configuration. The sum uses a
        # copy, because the engine's thread changes the original.
        return sum(one.prompt_tokens for one in list(self.roster.running))

    # ── the queue and the batch ──────────────────────────────────────────────────────────────

    @property
    def _held(self) -> int:
        """Number of jobs that have a slot in the core."""
        return len(self.roster.running) + len(self.roster.leaving)

    def pause(self, request: Request) -> bool:
        if not self.core.pause(request.slot):
            return False
        self.roster.running.remove(request)
        self.roster.paused.append(request)
        request.paused = True
        return True

    def unpause(self, request: Request) -> None:
        self.core.resume(request.slot)

    def resume(self, request: Request) -> bool:
        if self._held >= self._card.max_running:
            return False
        self.roster.paused.remove(request)
        self.roster.running.append(request)
        request.paused = False
        self.core.resume(request.slot)
        return True

    def release(self, request: Request, now: float) -> bool:
        if self._is_closed:
            return True
        roster = self.roster
        if request.slot < 0:
            roster.waiting.remove(request)
            return True
        (roster.paused if request.paused else roster.running).remove(request)
        handle, was_paused = request.slot, request.paused
        if self._by_handle.pop(handle, None) is None:  # the core itself has ended it
            return True
        self.core.abort([handle])
        if was_paused or self._frees_at_once:
            return True
        roster.leaving[request] = now
        return False

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def next_prompt_tokens(self, now: float, *, is_more_coming: bool) -> int:
        begun = [one for one in self.roster.running if one.first_token_at is None]
        tokens = sum(one.prompt_tokens for one in itertools.chain(begun, self.roster.waiting))
        return min(tokens, self._card.max_step_tokens)

    def schedule(self, now: float) -> Schedule:
        schedule, roster = Schedule(None, []), self.roster
        for request in [one for one in roster.waiting if not (one.compiling or one.held_back)]:
            if self._held >= self._card.max_running:
                break
            handle = next(self._handles)
            if (why := self._add(handle, request)) is not None:
                schedule.refused[request] = why
                continue
            roster.waiting.remove(request)
            roster.running.append(request)
            self._by_handle[handle] = request
            request.slot = handle
            schedule.started.append(request)
        return schedule

    def _add(self, handle: int, request: Request) -> EndReason | None:
        """Pass a job to the core. Returns the reason if the core does not take it."""
        try:
            self.core.add(handle, request.job, request.limit_tokens - request.prompt_tokens)
        except RequestError as error:
            return failed(error.code, str(error))
        except Exception as error:
            # An error in the core's ``add`` must not end other jobs. The message is not logged,
            # because it may quote the job.
            at, what = extract_tb(error.__traceback__)[-1], type(error).__name__
            where = f"{at.filename}:{at.lineno}"
            engine_log.error("the engine could not take up a job: %s at %s", what, where)
            self.core.abort([handle])
            return NOT_TAKEN
        return None

    def compute(self, plan: Plan | None, patience_s: Callable[[], float]) -> Executed | None:
        if not self._held:
            return None
        if self._began is None:
            self._began = self._clock()
            self._prompt_tokens_seen = self.core.load().prompt_tokens_total
        leaving = self.roster.leaving
        wait_s = MIN_WAIT_S if any(map(self._is_held, leaving)) else 0.0
        made = self.core.step(patience_s() if self.roster.running else wait_s)
        now = self._clock()
        done = Executed(book=self._book)
        done.freed = [one for one in leaving if not self._is_held(one)]
        for request in done.freed:
            del leaving[request]
        if any(one.ids or one.end or one.prompt for one in made):
            done.duration_s, self._began = now - self._began, now
            self._read(made, done)
        return done

    def end(self) -> None:
        if not self._held:
            self._began = None

    def _read(self, made: Sequence[Produced], done: Executed) -> None:
        """Translate a step's results, except those of aborted jobs."""
        read = self.core.load().prompt_tokens_total
        prompt_tokens = max(0, read - self._prompt_tokens_seen)
        self._prompt_tokens_seen = read
        rows: list[Row] = []
        logprobs: list[list[TokenLogprob] | None] = []
        prompts: dict[int, list[PromptLogprobs]] = {}
        result = done.result = StepResult([], logprobs, prompts)
        for one in made:
            request = self._by_handle.get(one.handle)
            if request is None:
                continue
            if one.cached_tokens:
                self._cached_tokens += one.cached_tokens - request.cached_tokens
                request.cached_tokens = one.cached_tokens
            if one.prompt is not None:
                prompts[len(rows)] = [one.prompt]
            ids = list(one.ids)
            if one.end is not None:
                del self._by_handle[one.handle]
                done.ended[request] = why = _own_end(one, one.end)
                ids = ids if why.code is None else []
            rows.append(Row(request, len(request.tokens), 0, bool(ids)))
            result.ids.append(ids)
            logprobs.append(one.logprobs)
        if rows:
            done.plan = Plan(rows, len(rows), len(rows) + prompt_tokens)

    @staticmethod
    def _book(row: Row, ids: list[int]) -> None:
        request = row.request
        request.tokens += ids
        request.least_tokens = max(0, request.least_tokens - len(ids))

    def _is_held(self, request: Request) -> bool:
        """Whether a leaving job's memory is not free yet and the wait may continue."""
        has_time = self._clock() < self.roster.leaving[request] + LONGEST_LEAVE_S
        return has_time and self.core.holds(request.slot)

    # ── accounts, and the end ────────────────────────────────────────────────────────────────

    def counts(self) -> dict[str, Any]:
        load = CoreLoad(0, 0, 0, 0) if self._is_closed else self.core.load()
        queued = min(load.waiting, self._held)  # the core may also queue some jobs
        return {
            "kv_blocks_total": load.kv_blocks_total,
            "kv_blocks_used": load.kv_blocks_used,
            "kv_blocks_free": load.kv_blocks_total - load.kv_blocks_used,
            "running": self._held - queued,
            "waiting": len(self.roster.waiting) + queued,
            "cached_tokens_total": self._cached_tokens,
            "kv_blocks_cached": load.kv_blocks_cached,
            "hit_blocks_total": load.hit_blocks_total,
            "missed_blocks_total": load.missed_blocks_total,
        }

    def halt(self) -> None:
        self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._by_handle:
                self.core.abort(list(self._by_handle))
            self.core.close()
        except Exception:
            engine_log.exception("the engine could not be closed; its process must end")
        roster = self.roster
        for held in (roster.leaving, roster.running, roster.paused, roster.waiting):
            held.clear()
        self._by_handle.clear()


def _own_end(made: Produced, end: FinishReason) -> EndReason:
    """Why the core ended a job by its own rules."""
    if end is FinishReason.STOP:
        return STOPPED
    if end is FinishReason.LENGTH:
        return LENGTH
    return failed(made.code or Code.ENGINE_ERROR, made.message)
