"""The whole worker: takes Triton's requests, owns the engine and the emitter, drains and stops.

``accept`` runs on Triton's request thread and only hands requests over. That thread applies lane
messages at once, so that a cancel reaches the engine without a wait.
"""

import math
import os
import time
from collections.abc import Callable
from functools import partial

import msgspec

from protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    AbortCause,
    Cancel,
    Code,
    Describe,
    Drain,
    End,
    Frame,
    InvalidSampling,
    LaneError,
    LaneMessage,
    ModelCard,
    OnDeadline,
    Open,
    Pause,
    Resume,
    Submit,
    Swap,
    decode_message,
    excerpt,
)
from protocol.tensors import LANE_MESSAGE
from worker.core import Clock, Job
from worker.engines import load_engine
from worker.errors import InvalidCall, LaneNotOpen, RequestError, Unauthenticated, WorkerDraining
from worker.grammar.constraint import Constraint
from worker.loaded import EngineLoader, LoadedEngine
from worker.log import service_log
from worker.service.access import Secret
from worker.service.call import Call, Responder, seconds
from worker.service.drain import Drainer
from worker.service.emitter import Emitter
from worker.service.failure import FailureWatch, ProcessGuard
from worker.service.lane import Lane, LaneJob, end_of_complete, refused, try_to_send
from worker.service.plain_intake import PlainIntake
from worker.service.serving import Serving
from worker.service.swap import Swapper
from worker.settings import WorkerSettings

STOP_GRACE_S = 2.0
"""Seconds that ``close`` waits for aborted jobs to be answered."""
MAX_DRAIN_MS = 24 * 3_600_000.0
"""Maximum grace period of a drain: a longer one would be an outage, not a drain."""
WRONG_LANE_TOKEN = (
    "this worker requires a lane token, but got a different one or none: set the same value as "
    "TIDEGATE_LANES__TOKEN for the orchestrator and TIDEGATE_WORKER__LANE_TOKEN for the worker"
)


class Worker:
    """Serves an engine that is loaded but not started, and later the engines that replace it."""

    def __init__(
        self,
        loaded: LoadedEngine,
        settings: WorkerSettings,
        clock: Clock = time.monotonic,
        load: EngineLoader = load_engine,
        die: Callable[[], None] = lambda: os._exit(1),
        guard: ProcessGuard | None = None,
        device_fault: Callable[[], str] = str,
    ) -> None:
        """``load`` loads models for swaps. ``die`` ends the process after a permanent failure;
        ``guard`` does so if ``die`` cannot be called. ``device_fault`` returns why the device is
        lost ("" if it is not)."""
        self._guard = guard
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self.emitter = Emitter(
            loaded.engine, heartbeat_s=HEARTBEAT_S, clock=clock, load_ms=loaded.load_ms
        )
        """Simulators start no threads and call its ``cycle`` instead."""
        self._drainer = Drainer(loaded.engine, self.emitter, clock)
        self._lane_token = Secret(settings.lane_token, "a lane, a drain or a swap was", clock)
        self._swapper = Swapper(loaded, settings, self.emitter, self._drainer, clock, load, die)
        self._failure = FailureWatch(
            lambda: self.serving.engine,
            self.emitter,
            self._drainer,
            clock,
            die,
            settings,
            device_fault,
        )
        self._plain = PlainIntake(lambda: self.serving, settings, self.emitter, clock)

    @property
    def serving(self) -> Serving:
        """The currently served model."""
        return self._swapper.serving

    def start(self) -> None:
        """Start the threads. Requests may arrive from now on."""
        if not self._lane_token.is_asked:
            service_log.warning(
                "no lane token is set (TIDEGATE_WORKER__LANE_TOKEN): every client of Triton's gRPC"
                " port may open lanes, read the hashes of cached blocks and drain this worker"
            )
        if self._guard is not None:
            self.emitter.each_cycle(self._guard.advance)
        self.emitter.before_events(self._failure.advance)
        self.emitter.each_cycle(self._drainer.advance)
        self.serving.engine.start(self.emitter.sink)
        self.emitter.start()

    def accept(self, call: Call) -> None:
        """Take over one request. Never raises: an error becomes the response."""
        try:
            data = call.data(LANE_MESSAGE)
            if data is None:
                self._plain.accept(call)
            elif len(data) > (most := self.serving.max_message_bytes):
                raise InvalidCall(
                    f"a lane message of {len(data)} bytes is too long; send at most {most} bytes"
                )
            else:
                self._apply(decode_message(data), call)
        except Exception as error:
            self.emitter.fail(call.responder, error)

    def refuse(self, responder: Responder, reason: str) -> None:
        """Answer a request that could not be read as a ``Call``."""
        self.emitter.fail(responder, InvalidCall(reason))

    def close(self) -> None:
        """Abort all jobs, answer all requests, end the threads. Idempotent."""
        self.emitter.post(lambda: self._drainer.begin(0.0, None))
        self._plain.close()
        self._swapper.close()
        serving = self.serving
        serving.close_grammars()
        give_up_at = self._clock() + STOP_GRACE_S
        while self.emitter.job_replies and self._clock() < give_up_at:
            time.sleep(0.005)
        serving.engine.stop()
        self.emitter.stop()
        if self._guard is not None:
            self._guard.close()

    # ── lanes ────────────────────────────────────────────────────────────────────────────────

    def _apply(self, message: LaneMessage, call: Call) -> None:
        match message:
            case Open():
                self._open(message, call.responder)
            case Submit():
                self._submit(message, call.responder)
            case Cancel():
                jobs = self._lane(message.lane).jobs
                for handle in message.handles:
                    if (found := jobs.get(handle)) is not None:
                        self.serving.engine.cancel(found.job, message.cause)
                self.emitter.post(call.responder.close)
            case Pause() | Resume():
                found = self._lane(message.lane).jobs.get(message.handle)
                if found is not None:
                    is_pause = isinstance(message, Pause)
                    engine = self.serving.engine
                    (engine.pause if is_pause else engine.resume)(found.job)
                self.emitter.post(call.responder.close)
            case Describe():
                lane = self._lane(message.lane)
                self.emitter.post(lambda: self.emitter.describe(lane, self.serving.card))
                self.emitter.post(call.responder.close)
            case Drain():
                grace_s = self._grace_s(message)
                self.emitter.post(lambda: self._drainer.begin(grace_s, call.responder))
            case Swap():
                self._swapper.swap(
                    message.settings,
                    self._grace_s(message),
                    call.responder,
                    anew=message.anew,
                )

    def _grace_s(self, message: Drain | Swap) -> float:
        """Seconds that running jobs get to end. Raises ``Unauthenticated`` or ``InvalidCall``."""
        if not self._lane_token.admits(message.token):
            raise Unauthenticated(WRONG_LANE_TOKEN)
        if not 0 <= message.grace_ms <= MAX_DRAIN_MS:
            raise InvalidCall(
                f"grace_ms must be from 0 to {MAX_DRAIN_MS:.0f}, got {message.grace_ms:g}"
            )
        return message.grace_ms / 1000

    def _open(self, message: Open, responder: Responder) -> None:
        error: LaneError | None = None
        if message.version != PROTOCOL_VERSION:
            error = LaneError(
                Code.PROTOCOL_VERSION,
                f"this worker speaks lane protocol {PROTOCOL_VERSION}, not {message.version}; "
                "run the same Tidegate version on both sides",
            )
        elif not self._lane_token.admits(message.token):
            error = LaneError(Code.UNAUTHENTICATED, WRONG_LANE_TOKEN)
        elif self.emitter.draining and not self._drainer.is_swapping:
            error = LaneError(Code.DRAINING, "the worker is draining; open a lane elsewhere")
        if error is not None:
            frame = Frame(0, error=error)
            self.emitter.post(lambda: try_to_send(responder, frame, final=True))
            return
        for name in [name for name, lane in self._lanes.items() if lane.ended]:
            del self._lanes[name]
        if message.lane in self._lanes:
            raise InvalidCall(
                f"lane {excerpt(message.lane)} is open already; every lane needs its own name"
            )
        lane = Lane(message.lane, responder)
        self._lanes[message.lane] = lane

        # Runs on the thread that replaces models, so that the lane gets the current card.
        self.emitter.post(lambda: self.emitter.open_lane(lane, self.serving.card))

    def _submit(self, message: Submit, responder: Responder) -> None:
        lane = self._lane(message.lane)
        if message.handle in lane.jobs:
            raise InvalidCall(f"handle {message.handle} is in use on this lane")
        constraint: Constraint | None = None
        end: End | None = None
        now = self._clock()
        serving = self.serving
        try:
            self._check(message, serving.card)
            # Without ``begun`` tokens, stop strings count after ``min_tokens``.
            stop_after = message.stop_after_tokens if message.begun_tokens else None
            text = serving.tokenizer.stream_for(message.sampling, stop_after)
            end = end_of_complete(text, message, serving.card)
            if end is None:
                finishes = message.on_deadline is OnDeadline.FINISH
                constraint = serving.constraint(
                    message.grammar,
                    message.sampling,
                    message.begun,
                    finish_by=now + message.budget_ms / 1000 if finishes else None,
                    clock=self._clock,
                )
        except (RequestError, InvalidSampling) as error:
            end = refused(message.handle, len(message.token_ids), error)
        if end is not None:
            self.emitter.post(partial(lane.end, end))
            self.emitter.post(lambda: self.emitter.flush(lane))
            self.emitter.post(responder.close)
            return
        job = Job(
            token_ids=message.token_ids,
            sampling=message.sampling,
            deadline=now + message.budget_ms / 1000,
            on_deadline=message.on_deadline,
            correlation_id=excerpt(message.correlation_id, 128),
            cache_salt=message.cache_salt,
            session=message.session,
            session_keep_s=message.session_keep_ms / 1000,
            first_token_by=now + seconds(message.first_token_budget_ms),
            token_gap_s=seconds(message.token_gap_ms),
            due_by=now + seconds(message.share_ms),
            keeps_on=message.keeps_on,
            constraint=constraint,
            begun_tokens=message.begun_tokens,
            expected_tokens=message.expected_tokens,
            images=message.images,
            adapter=message.adapter,
        )
        lane_job = LaneJob(lane, message.handle, job, text, responder)
        if not lane.jobs:
            self.emitter.post(lambda: self.emitter.watch_closely(lane))
        lane.jobs[message.handle] = lane_job
        self.emitter.job_replies[job] = lane_job
        serving.engine.submit(job)
        if lane.ended:  # lost after the check above and before registration: only this stops it
            serving.engine.cancel(job, AbortCause.LANE_LOST)

    def _check(self, message: Submit, card: ModelCard) -> None:
        """Raise ``RequestError`` or ``InvalidSampling`` for a job that the engine must not get."""
        if self.emitter.draining:
            raise WorkerDraining("the worker is draining; retry elsewhere")
        if message.serving != card.serving:
            raise WorkerDraining("the worker has another model by now; retry elsewhere")
        sampling = message.sampling
        if message.begun_tokens and not sampling.max_tokens:  # a complete text, to get its end
            sampling = msgspec.structs.replace(sampling, max_tokens=1)
        sampling.check(card.vocab_size)
        if message.images and card.vision is None:
            raise InvalidCall("this worker's model reads no images")
        if message.adapter and message.adapter not in (one.name for one in card.adapters):
            raise InvalidCall(f"this worker has no adapter {excerpt(message.adapter)}")
        ids = message.token_ids
        # Checked here, not only in the engine: block hashes need valid token ids.
        if ids and (min(ids) < 0 or max(ids) >= card.vocab_size):
            raise InvalidCall(f"token ids are from 0 to {card.vocab_size - 1}")
        if not 0 <= message.begun_tokens <= len(ids):
            raise InvalidCall("begun_tokens must be how many of the last token_ids were generated")
        budgets = (
            message.budget_ms,
            message.first_token_budget_ms,
            message.token_gap_ms,
            message.session_keep_ms,
            message.share_ms,
        )
        if any(budget is not None and math.isnan(budget) for budget in budgets):
            raise InvalidCall("a budget must be a number of milliseconds")

    def _lane(self, name: str) -> Lane:
        lane = self._lanes.get(name)
        if lane is None or lane.ended:
            raise LaneNotOpen(f"lane {excerpt(name)} is not open here; open one first")
        return lane
