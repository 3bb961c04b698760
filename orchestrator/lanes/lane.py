"""One lane: a stream to one Triton instance that carries many jobs, and comes back when it breaks.

::

    run ─▶ connect ─▶ Open ─▶ first frame (card) ─▶ frames … ─▶ broken ─▶ backoff ─▶ connect …
                                 ▲ up                             ▲ every job on it is lost

The reader decodes a frame and hands each part to its job, synchronously: it waits for nothing but
the next frame. Messages leave through an outbox, so that nobody who submits waits either.
"""

import asyncio
import random
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.clock import Clock
from orchestrator.errors import InstanceLost, TidegateError
from orchestrator.lanes.wire import BadResponse, to_frame, to_request
from orchestrator.telemetry.log import fields, lane_log
from worker.protocol import (
    PROTOCOL_VERSION,
    AbortCause,
    Cancel,
    Code,
    Delta,
    Describe,
    End,
    Frame,
    LaneMessage,
    OnDeadline,
    Open,
    Pause,
    Resume,
    Sampling,
    Submit,
)

SAMPLE_EVERY = 64
"""One frame in this many is timed from its decoding to its tokens being written (LB-8)."""
PROBE_S = 2.0
"""A lane that carries nothing is tried this often: Triton may have loaded its model anew, and then
sends what comes to the new instance, while the old one goes on with its heartbeats here."""
NO_JOB = -1
"""A handle that no job has: a message about it says that the lane is known, and changes nothing."""


class JobSink(Protocol):
    """Hears of one job on a lane. Called by the lane's reader: must neither wait nor raise."""

    def started(self, wait_ms: float) -> None: ...

    def tokens(self, delta: Delta, now: float) -> None: ...

    def paused(self) -> None:
        """The job stands still; what follows may be ``resumed``, ``ended`` or ``lost``."""

    def resumed(self) -> None:
        """The job goes on."""

    def ended(self, end: End) -> None:
        """The job's terminal record; nothing follows."""

    def lost(self, error: TidegateError) -> None:
        """The job will not be heard of again; nothing follows."""


class LaneOwner(Protocol):
    """Hears of a lane's own state."""

    def lane_opened(self, lane: "Lane", first: Frame) -> None:
        """The lane is up. ``first`` carries the model card."""

    def lane_news(self, lane: "Lane", frame: Frame) -> None:
        """A frame with statistics, a drain, a new card or news of the prefix cache."""

    def lane_closed(self, lane: "Lane", reason: str) -> None:
        """The lane is broken; its jobs have been told."""

    def emission_sampled(self, seconds: float, tokens: int) -> None:
        """A frame with that many tokens took this long to reach its clients' sockets."""


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """How lanes connect. Seconds."""

    open_timeout_s: float
    keepalive_s: float
    reconnect_min_s: float
    reconnect_max_s: float
    token: str = field(default="", repr=False)
    """What workers ask of whoever opens a lane."""


class LaneBroken(Exception):
    """The lane cannot go on; the message says why, for people."""


class LaneStale(LaneBroken):
    """What is sent on the lane does not reach the worker that opened it. A new one will do."""


class _Call(Protocol):
    """The part of a ``grpc.aio`` stream that a lane uses."""

    async def write(self, request: service_pb2.ModelInferRequest) -> None: ...

    async def read(self) -> service_pb2.ModelStreamInferResponse: ...

    def cancel(self) -> bool: ...


_LANE_CLOSED = f"{Code.LANE_CLOSED.value}: "
_STALE = "the model was loaded anew; its lanes are opened anew"
_UNAVAILABLE = "has no available versions"
"""Triton's own words, for a model that is unloaded or a server that is going down."""


def _was_stale(session: asyncio.Task[None]) -> bool:
    return not session.cancelled() and isinstance(session.exception(), LaneStale)


class Lane:
    """One lane to the instance at ``address``. Its jobs are numbered by ``handle``."""

    def __init__(
        self,
        address: str,
        config: LaneConfig,
        owner: LaneOwner,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.address = address
        self.is_open = False
        self.is_reopening = False
        """It was given up because it was stale, and the next attempt to connect has not failed."""
        self.is_closing = False
        """Triton takes no new requests for the model; jobs that it has go on."""
        self.last_frame_at = clock.now()
        self._last_sent_at = clock.now()
        self.tokens_total = 0
        self.frames_total = 0
        self.sessions_total = 0
        self.submitted_total = 0
        self._config = config
        self._owner = owner
        self._clock = clock
        self._rng = rng
        self._name = ""
        self._jobs: dict[int, JobSink] = {}
        self._next_handle = 0
        self._outbox: deque[service_pb2.ModelInferRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._breaking: str | None = None
        self._session: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Jobs that the worker has not reported the end of."""
        return len(self._jobs)

    def silent_s(self, now: float) -> float:
        """How long ago its last frame came, in seconds."""
        return now - self.last_frame_at

    # ── for those who have work ──────────────────────────────────────────────────────────────

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
        """Send a job; returns its handle. Exactly one of ``ended`` and ``lost`` will follow."""
        assert self.is_open, "submitted to a lane that is not open"
        handle = self._next_handle
        self._next_handle += 1
        message = Submit(
            lane=self._name,
            handle=handle,
            token_ids=token_ids,
            sampling=sampling,
            budget_ms=budget_ms,
            deadline_unix_ms=deadline_unix_ms,
            on_deadline=on_deadline,
            correlation_id=correlation_id,
            cache_salt=cache_salt,
            session=session,
            first_token_budget_ms=first_token_budget_ms,
            token_gap_ms=token_gap_ms,
            keeps_on=keeps_on,
        )
        self._post(message, f"{handle}/{correlation_id}")
        self.submitted_total += 1
        self._jobs[handle] = sink
        return handle

    def cancel(self, handle: int, cause: AbortCause) -> None:
        """Stop a job within one engine step. Idempotent; its end is still reported."""
        if handle in self._jobs and self.is_open:
            self._post(Cancel(lane=self._name, handle=handle, cause=cause), f"cancel/{handle}")

    def pause(self, handle: int) -> None:
        """Have a job stand still, its KV kept. Idempotent; for workers that ``can_pause``."""
        if handle in self._jobs and self.is_open:
            self._post(Pause(lane=self._name, handle=handle), f"pause/{handle}")

    def resume(self, handle: int) -> None:
        """Have a paused job go on. Idempotent."""
        if handle in self._jobs and self.is_open:
            self._post(Resume(lane=self._name, handle=handle), f"resume/{handle}")

    def describe(self) -> None:
        """Ask for the card and a full cache report."""
        if self.is_open:
            self._post(Describe(lane=self._name), "describe")

    def probe(self) -> None:
        """Find out whether what is sent still arrives, if nothing else would; call it often."""
        if not self.is_open or (self._jobs and not self.is_closing):
            return
        if self._clock.now() - self._last_sent_at >= PROBE_S:
            self._post(Cancel(lane=self._name, handle=NO_JOB), "probe")

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Connect, and keep connected until ``close``."""
        self._runner = asyncio.create_task(self._run(), name=f"lane {self.address}")

    async def close(self) -> None:
        """End the stream: the worker then stops whatever still runs on it. Idempotent."""
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None

    def break_off(self, reason: str) -> None:
        """Give this stream up and connect anew."""
        if self._session is not None:
            self._breaking = reason
            self._session.cancel()

    def reopen(self) -> None:
        """Give this stream up as stale, as another one to the same worker was found to be."""
        if self.is_open:
            self.is_open, self.is_reopening = False, True
            self.break_off(_STALE)

    async def _run(self) -> None:
        pause = self._config.reconnect_min_s
        while True:
            sessions = self.sessions_total
            self._session = asyncio.create_task(self._connect_and_read())
            reason = await self._outcome(self._session)
            told = self.is_reopening and self._session.cancelled()
            self.is_reopening = told or _was_stale(self._session)
            self._close_session(reason)
            if self.sessions_total > sessions:
                pause = self._config.reconnect_min_s
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
            pause = min(2 * pause, self._config.reconnect_max_s)

    async def _outcome(self, session: asyncio.Task[None]) -> str:
        """Why ``session`` ended. When we are cancelled ourselves, end it first."""
        try:
            await asyncio.wait([session])
        except asyncio.CancelledError:
            session.cancel()
            await asyncio.wait([session])
            self._close_session("the orchestrator is stopping")
            raise
        if session.cancelled():
            return self._breaking or "the stream was cancelled"
        error = session.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            return f"{error.code().name.lower()}: {error.details()}"
        if isinstance(error, TimeoutError):
            return f"no answer within {self._config.open_timeout_s:g} s"
        if isinstance(error, LaneBroken | BadResponse | msgspec.DecodeError):
            return str(error)
        lane_log.error(
            "a lane failed unexpectedly", exc_info=error, extra=fields(instance=self.address)
        )
        return f"unexpected {type(error).__name__}"

    def _close_session(self, reason: str) -> None:
        self.is_open = self.is_closing = False
        self._breaking = None
        self._session = None
        self._outbox.clear()
        jobs, self._jobs = self._jobs, {}
        for sink in jobs.values():
            sink.lost(InstanceLost("the instance that worked on this was lost; try again"))
        self._owner.lane_closed(self, reason)

    # ── one session ──────────────────────────────────────────────────────────────────────────

    async def _connect_and_read(self) -> None:
        # A channel per session: its own backoff must not add to ours, and without a pool of its
        # own each further lane would share the first one's connection.
        channel = grpc.aio.insecure_channel(
            self.address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.keepalive_time_ms", int(self._config.keepalive_s * 1000)),
            ],
        )
        writer: asyncio.Task[None] | None = None
        try:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            try:
                async with asyncio.timeout(self._config.open_timeout_s):
                    seq = await self._open(call)
                writer = asyncio.create_task(self._write(call))
                await self._read(call, seq)
            finally:
                call.cancel()
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])
            await channel.close()

    async def _open(self, call: _Call) -> int:
        self._name = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        message = Open(PROTOCOL_VERSION, self._name, self._config.token)
        await call.write(to_request(message, "open"))
        self._last_sent_at = self._clock.now()
        frame = self._frame(await call.read())
        if frame is None or frame.card is None:
            raise LaneBroken("the first frame carried no model card")
        self.sessions_total += 1
        self.last_frame_at = self._clock.now()
        self.is_open = True
        self.is_reopening = False
        self._owner.lane_opened(self, frame)
        self._dispatch(frame, self.last_frame_at)
        return frame.seq

    async def _read(self, call: _Call, seq: int) -> None:
        now_of = self._clock.now
        until_sample = SAMPLE_EVERY
        while True:
            frame = self._frame(await call.read())
            if frame is None:
                continue
            seq += 1
            if frame.seq != seq:
                raise LaneBroken(f"expected frame {seq}, got {frame.seq}: tokens are missing")
            now = now_of()
            self.last_frame_at = now
            tokens = self._dispatch(frame, now)
            until_sample -= 1
            if until_sample <= 0 and tokens:
                until_sample = SAMPLE_EVERY
                self._owner.emission_sampled(now_of() - now, tokens)
            if (
                frame.stats is not None
                or frame.draining
                or frame.card is not None
                or frame.cache is not None
            ):
                self._owner.lane_news(self, frame)

    def _frame(self, response: service_pb2.ModelStreamInferResponse) -> Frame | None:
        """The frame in what was read; None for a response without data."""
        if response is grpc.aio.EOF:
            raise LaneBroken("the worker closed the lane")
        if response.error_message:
            self._refused(response.infer_response.id, response.error_message)
            return None
        frame = to_frame(response.infer_response)
        if frame is not None and frame.error is not None:
            raise LaneBroken(frame.error.message)
        return frame

    def _refused(self, request_id: str, message: str) -> None:
        """An error in-band: one job's where the id says so, else the whole lane's.

        A worker says what is wrong with a job in a frame, so this is Triton's own trouble, or the
        word of a worker that does not know this lane.
        """
        if _LANE_CLOSED in message:
            # Nobody may be given a job here from now on, and those there are go back to the queue.
            self.is_open, self.is_reopening = False, True
            raise LaneStale(_STALE)
        head = request_id.partition("/")[0]
        job = self._jobs.pop(int(head), None) if head.isascii() and head.isdigit() else None
        if _UNAVAILABLE in message:
            # Unloaded, or going down: what runs may end there, but nothing new gets through.
            self.is_closing = True
        elif job is None:
            raise LaneBroken(message)
        if job is not None:
            job.lost(InstanceLost(f"the instance could not go on with this: {message}"))
        if self.is_closing and not self._jobs:
            raise LaneBroken(message)

    def _dispatch(self, frame: Frame, now: float) -> int:
        """Hand a frame's parts to their jobs; returns how many tokens there were."""
        jobs = self._jobs
        for started in frame.started:
            sink = jobs.get(started.handle)
            if sink is not None:
                sink.started(started.wait_ms)
        tokens = 0
        for delta in frame.deltas:
            tokens += len(delta.ids)
            sink = jobs.get(delta.handle)
            if sink is not None:
                sink.tokens(delta, now)
        for handle in frame.paused:
            sink = jobs.get(handle)
            if sink is not None:
                sink.paused()
        for handle in frame.resumed:
            sink = jobs.get(handle)
            if sink is not None:
                sink.resumed()
        for end in frame.ends:
            sink = jobs.pop(end.handle, None)
            if sink is not None:
                sink.ended(end)
        self.tokens_total += tokens
        self.frames_total += 1
        return tokens

    async def _write(self, call: _Call) -> None:
        try:
            while True:
                while self._outbox:
                    await call.write(self._outbox.popleft())
                self._outbox_filled.clear()
                await self._outbox_filled.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader sees the same end, with its reason; wait for it to say so.
            lane_log.debug("a lane's writer ended: %s", error, extra=fields(instance=self.address))

    def _post(self, message: LaneMessage, request_id: str) -> None:
        self._last_sent_at = self._clock.now()
        self._outbox.append(to_request(message, request_id))
        self._outbox_filled.set()
