"""The worker as a whole: takes Triton's requests, owns engine and emitter, drains and stops.

``accept`` runs on Triton's request thread and only hands over. Lane messages are applied there
and then, so that a cancel reaches the engine without waiting for anything; plain prompts are
tokenised on a thread of their own, so that a long one does not delay a lane.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from worker.core import Clock, Job
from worker.engine.build import EngineBundle
from worker.log import service_log
from worker.protocol import (
    MOST_MESSAGE_CHARS,
    PROTOCOL_VERSION,
    AbortCause,
    Cancel,
    Code,
    Describe,
    Drain,
    Frame,
    InvalidSampling,
    LaneError,
    LaneMessage,
    Open,
    Pause,
    Resume,
    Submit,
    decode_message,
    encode,
    excerpt,
)
from worker.protocol.tensors import FRAME, LANE_MESSAGE, PARAM_TOKEN
from worker.service.access import Secret, say_what_is_open
from worker.service.call import Call, InvalidCall, Responder, ResponderLost, Tensors, strings
from worker.service.drain import Drainer
from worker.service.emitter import Emitter
from worker.service.lane import Lane, LaneRoute
from worker.service.plain_request import CannotFit, PlainReply, parse_plain
from worker.settings import WorkerSettings

MESSAGE_BYTES = 2**20
"""A lane message has at most as many bytes, and these for each token of the context."""
BYTES_PER_TOKEN = 5
STOP_GRACE_S = 2.0
"""How long ``close`` waits for aborted jobs to be answered."""
MAX_DRAIN_MS = 24 * 3_600_000.0
"""Longer is no drain but an outage."""


WRONG_LANE_TOKEN = (
    "this worker asks for a lane token, and another one or none was shown: set the same value as "
    "TIDEGATE_LANE_TOKEN for the orchestrator and TIDEGATE_WORKER_LANE_TOKEN for the worker"
)
WRONG_PLAIN_TOKEN = f"this worker asks for a token: state it as the request parameter {PARAM_TOKEN}"


class LaneNotOpen(InvalidCall):
    """A message names a lane that this worker does not have: another instance of the model may."""


class WorkerService:
    """One model's worker, over an engine that is loaded but not started."""

    def __init__(
        self, bundle: EngineBundle, settings: WorkerSettings, clock: Clock = time.monotonic
    ) -> None:
        self._engine = bundle.engine
        self._tokenizer = bundle.tokenizer
        self._card = bundle.card
        self._most_message_bytes = MESSAGE_BYTES + BYTES_PER_TOKEN * bundle.card.context_tokens
        self._settings = settings
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._emitter = Emitter(self._engine, heartbeat_s=settings.heartbeat_ms / 1000, clock=clock)
        self._drainer = Drainer(self._engine, self._emitter, clock, hold_s=settings.drain_hold_s)
        self._lane_token = Secret(settings.lane_token, "a lane or a drain was", clock)
        self._plain_token = Secret(settings.plain_token, "a plain request was", clock)
        self._intake = ThreadPoolExecutor(1, thread_name_prefix="tidegate-intake")

    @property
    def emitter(self) -> Emitter:
        """For simulators, which start no threads and call ``cycle`` instead."""
        return self._emitter

    def start(self) -> None:
        """Start the threads; requests may come from now on."""
        say_what_is_open(self._lane_token)
        self._emitter.each_cycle(self._drainer.advance)
        self._engine.start(self._emitter.sink)
        self._emitter.start()

    def accept(self, call: Call) -> None:
        """Take over one request. Never raises: what is wrong with it is its answer."""
        try:
            data = call.data(LANE_MESSAGE)
            if data is None:
                self._intake.submit(self._accept_plain, call, self._clock())
            elif len(data) > self._most_message_bytes:
                raise InvalidCall(
                    f"a lane message of {len(data)} bytes is too long; at most "
                    f"{self._most_message_bytes} are taken"
                )
            else:
                self._apply(decode_message(data), call)
        except LaneNotOpen as error:
            self._fail(call, Code.LANE_CLOSED, error)
        except (InvalidCall, msgspec.DecodeError) as error:
            self._fail(call, Code.INVALID_REQUEST, error)
        except Exception as error:
            service_log.exception("a request could not be accepted")
            self._fail(call, Code.INTERNAL, error)

    def refuse(self, responder: Responder, reason: str) -> None:
        """Answer a request that is no ``Call``."""
        message = excerpt(reason, MOST_MESSAGE_CHARS)
        self._emitter.post(lambda: responder.fail(Code.INVALID_REQUEST, message))

    def close(self) -> None:
        """Abort everything, answer everything, end the threads. Idempotent."""
        self._emitter.post(lambda: self._drainer.begin(0.0, None))
        self._intake.shutdown(wait=True)
        give_up_at = self._clock() + STOP_GRACE_S
        while self._emitter.routes and self._clock() < give_up_at:
            time.sleep(0.005)
        self._engine.stop()
        self._emitter.stop()

    # ── lanes ────────────────────────────────────────────────────────────────────────────────

    def _apply(self, message: LaneMessage, call: Call) -> None:
        match message:
            case Open():
                self._open(message, call.responder)
            case Submit():
                self._submit(message, call.responder)
            case Cancel():
                route = self._lane(message.lane).routes.get(message.handle)
                if route is not None:
                    self._engine.cancel(route.job, message.cause)
                self._emitter.post(call.responder.close)
            case Pause() | Resume():
                route = self._lane(message.lane).routes.get(message.handle)
                if route is not None:
                    is_pause = isinstance(message, Pause)
                    (self._engine.pause if is_pause else self._engine.resume)(route.job)
                self._emitter.post(call.responder.close)
            case Describe():
                lane = self._lane(message.lane)
                self._emitter.post(lambda: self._emitter.describe(lane, self._card))
                self._emitter.post(call.responder.close)
            case Drain():
                self._drain(message, call)

    def _drain(self, message: Drain, call: Call) -> None:
        if not self._lane_token.admits(message.token):
            self._fail(call, Code.UNAUTHENTICATED, WRONG_LANE_TOKEN)
            return
        if not 0 <= message.grace_ms <= MAX_DRAIN_MS:
            raise InvalidCall(
                f"grace_ms must be from 0 to {MAX_DRAIN_MS:.0f}, got {message.grace_ms:g}"
            )
        grace_s = message.grace_ms / 1000
        self._emitter.post(lambda: self._drainer.begin(grace_s, call.responder))

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
        elif self._emitter.draining:
            error = LaneError(Code.DRAINING, "the worker is draining; open a lane elsewhere")
        if error is not None:
            frame = {FRAME: strings(encode(Frame(0, error=error)))}
            self._emitter.post(lambda: _send_last(responder, frame))
            return
        for name in [name for name, lane in self._lanes.items() if lane.ended]:
            del self._lanes[name]
        if message.lane in self._lanes:
            raise InvalidCall(
                f"lane {excerpt(message.lane)} is open already; every lane needs its own name"
            )
        lane = Lane(message.lane, responder)
        lane.describe(self._card)
        self._lanes[message.lane] = lane
        self._emitter.post(lambda: self._emitter.open_lane(lane))

    def _submit(self, message: Submit, responder: Responder) -> None:
        lane = self._lane(message.lane)
        if message.handle in lane.routes:
            raise InvalidCall(f"handle {message.handle} is in use on this lane")
        refusal = self._refusal(message)
        if refusal is not None:
            code, reason = refusal
            self._emitter.post(
                lambda: self._refuse(lane, message.handle, len(message.token_ids), code, reason)
            )
            self._emitter.post(responder.close)
            return
        now = self._clock()
        job = Job(
            token_ids=message.token_ids,
            sampling=message.sampling,
            deadline=now + message.budget_ms / 1000,
            on_deadline=message.on_deadline,
            correlation_id=excerpt(message.correlation_id, 128),
            cache_salt=message.cache_salt,
            session=message.session,
            first_token_by=now + _seconds(message.first_token_budget_ms),
            token_gap_s=_seconds(message.token_gap_ms),
            keeps_on=message.keeps_on,
        )
        text = self._tokenizer.stream(message.sampling.stop, message.sampling.min_tokens)
        route = LaneRoute(lane, message.handle, job, text, responder)
        lane.routes[message.handle] = route
        self._emitter.routes[job] = route
        self._engine.submit(job)
        if lane.ended:  # lost between the look above and the registration: nobody else will stop it
            self._engine.cancel(job, AbortCause.LANE_LOST)

    def _refusal(self, message: Submit) -> tuple[Code, str] | None:
        if self._emitter.draining:
            return Code.DRAINING, "the worker is draining; retry elsewhere"
        try:
            message.sampling.check(self._card.vocab_size)
        except InvalidSampling as error:
            return Code.INVALID_REQUEST, str(error)
        ids = message.token_ids
        # Here and not in the engine alone: its block hashes cannot be made of any other number.
        if ids and (min(ids) < 0 or max(ids) >= self._card.vocab_size):
            return Code.INVALID_REQUEST, f"token ids are from 0 to {self._card.vocab_size - 1}"
        parts = (message.budget_ms, message.first_token_budget_ms, message.token_gap_ms)
        if any(part is not None and math.isnan(part) for part in parts):
            return Code.INVALID_REQUEST, "a budget must be a number of milliseconds"
        return None

    def _lane(self, name: str) -> Lane:
        lane = self._lanes.get(name)
        if lane is None or lane.ended:
            raise LaneNotOpen(f"lane {excerpt(name)} is not open here; open one first")
        return lane

    def _refuse(self, lane: Lane, handle: int, prompt_tokens: int, code: Code, text: str) -> None:
        lane.refuse(handle, prompt_tokens, code, text)
        self._emitter.flush(lane)

    # ── plain requests ───────────────────────────────────────────────────────────────────────

    def _accept_plain(self, call: Call, received: float) -> None:
        try:
            if not self._plain_token.admits(call.parameters.get(PARAM_TOKEN)):
                self._fail(call, Code.UNAUTHENTICATED, WRONG_PLAIN_TOKEN)
                return
            if self._emitter.draining:
                self._fail(call, Code.DRAINING, "the worker is draining; retry elsewhere")
                return
            request = parse_plain(
                call,
                default_deadline_ms=self._settings.default_deadline_ms,
                unix_ms=time.time() * 1000,
                vocab_size=self._card.vocab_size,
                defaults=self._card.sampling_defaults,
            )
            if self._cannot_fit(request.prompt):
                self._fail(call, Code.CONTEXT_OVERFLOW, self._too_long(request.prompt))
                return
            token_ids = self._tokenizer.encode(request.prompt)
            sampling = request.sampling_for(len(token_ids), self._card)
        except CannotFit as error:
            self._fail(call, Code.CONTEXT_OVERFLOW, error)
            return
        except (InvalidCall, InvalidSampling) as error:
            self._fail(call, Code.INVALID_REQUEST, error)
            return
        except Exception as error:
            service_log.exception("a plain request could not be read")
            self._fail(call, Code.INTERNAL, error)
            return
        job = Job(
            token_ids=token_ids,
            sampling=sampling,
            deadline=received + request.budget_ms / 1000,
            on_deadline=request.on_deadline,
            correlation_id=excerpt(call.request_id, 128),
            first_token_by=received + _seconds(request.first_token_ms),
            token_gap_s=_seconds(request.token_gap_ms),
        )
        text = self._tokenizer.stream(sampling.stop, sampling.min_tokens)
        reply = PlainReply(request, job, text, call.responder, self._tokenizer)
        self._emitter.routes[job] = reply
        self._emitter.post(lambda: self._emitter.watch(reply))
        self._engine.submit(job)

    def _cannot_fit(self, prompt: str) -> bool:
        """Certain without tokenising, which takes a second for a few megabytes."""
        return len(prompt) > self._card.context_tokens * self._tokenizer.longest_token_bytes

    def _too_long(self, prompt: str) -> str:
        return (
            f"the prompt has {len(prompt)} characters, more than this model's context of "
            f"{self._card.context_tokens} tokens can stand for{self._card.context_note}"
        )

    def _fail(self, call: Call, code: Code, reason: object) -> None:
        message = excerpt(reason, MOST_MESSAGE_CHARS)
        self._emitter.post(lambda: call.responder.fail(code, message))


def _seconds(ms: float | None) -> float:
    return math.inf if ms is None else ms / 1000


def _send_last(responder: Responder, tensors: Tensors) -> None:
    try:
        responder.send(tensors, final=True)
    except ResponderLost as error:
        service_log.info("a refused lane was gone already: %s", error)
