"""One lane: a stream to one Triton instance that carries many jobs and reconnects when it breaks.

::

    run ─▶ connect ─▶ Open ─▶ first frame (card) ─▶ frames … ─▶ broken ─▶ backoff ─▶ connect …
                                 ▲ up                             ▲ every job on it is lost

A frame is decoded on arrival, and each part is passed to its job synchronously in the event loop's
callback. Messages leave at once, or when the peer has room; submitters never wait.
"""

import asyncio
import random
import uuid
from typing import Unpack

import msgspec
from google.protobuf.message import DecodeError

from orchestrator.clock import Clock
from orchestrator.errors import InstanceLost
from orchestrator.lanes.base import JobFields, JobSink, Lane, LaneOwner, lost
from orchestrator.lanes.config import OPEN_TIMEOUT_S, RENEW_AFTER_BYTES, LaneConfig
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.lanes.reconnector import Reconnector, SessionEnd
from orchestrator.lanes.wire import (
    STREAM_METHOD,
    BadResponse,
    service_pb2,
    to_frame,
    to_request,
)
from protocol import (
    PROTOCOL_VERSION,
    AbortCause,
    Cancel,
    Code,
    Delta,
    Describe,
    Frame,
    LaneMessage,
    Open,
    Pause,
    Resume,
    Submit,
)

PROBE_S = 2.0
"""Seconds between probes of an idle lane: if Triton has reloaded its model, messages go to the new
instance while the old one still sends heartbeats here."""
_RESPONSE_BYTES = 1024
"""Bytes that Triton keeps per response in addition to the data (24.10, measured)."""
NO_JOB = -1
"""A handle without a job: a message for it only tests that the worker knows the lane."""


class LaneBroken(Exception):
    """The lane cannot continue; the message has the reason."""


class LaneStale(LaneBroken):
    """Messages on the lane do not reach the worker that opened it. A new lane fixes this."""


_LANE_CLOSED = f"{Code.LANE_CLOSED.value}: "
_STALE = "the model was reloaded; reopening its lanes"
_UNAVAILABLE = "has no available versions"
"""Triton's message for an unloaded model or a server that is shutting down."""


class StreamLane(Lane):
    """A lane over one ``ModelStreamInfer`` call of Tidegate's own worker."""

    def __init__(
        self,
        address: str,
        config: LaneConfig,
        owner: LaneOwner,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__(address, owner, clock)
        self._config = config
        self._rng = rng
        self._name = ""
        self._last_sent_at = clock.now()
        self._stream: GrpcCall | None = None
        self._opened: asyncio.Future[None] | None = None
        """Done when a session's first frame arrives."""
        self._seq = 0
        self._carried_bytes = 0
        """Bytes that Triton keeps for this session."""
        self._is_leaving = False
        """Whether the peer will close the connection: another lane takes over first."""
        self._jobs: dict[int, JobSink] = {}
        self._next_handle = 0
        self._cancels: dict[AbortCause, list[int]] = {}
        self._held: dict[int, Delta] = {}
        """Tokens of the messages that are being processed, by job."""
        self._sessions = Reconnector(
            "lane",
            address,
            self._connect_and_read,
            self._session_ended,
            rng=rng,
            expected=(CallEnded, LaneBroken, BadResponse, DecodeError, msgspec.DecodeError),
        )

    # ── for callers with work ───────────────────────────────────────────────────────────────

    @property
    def load(self) -> int:
        return len(self._jobs)

    def submit(self, sink: JobSink, **job: Unpack[JobFields]) -> int:
        assert self.is_open, "submitted to a lane that is not open"
        handle = self._next_handle
        message = Submit(lane=self._name, handle=handle, **job)
        self._post(message, f"{handle}/{message.correlation_id}")
        # A job counts only if its message could be encoded.
        self._next_handle += 1
        self.submitted_total += 1
        self._jobs[handle] = sink
        return handle

    def cancel(self, handle: int, cause: AbortCause) -> None:
        if handle in self._jobs and self.is_open:
            if not self._cancels:
                asyncio.get_running_loop().call_soon(self._send_cancels)
            self._cancels.setdefault(cause, []).append(handle)

    def _send_cancels(self) -> None:
        """Send all cancels of one pass of the loop as one message per cause. A thousand separate
        messages would take seconds to get through Triton."""
        cancels, self._cancels = self._cancels, {}
        for cause, handles in cancels.items():
            self._post(Cancel(self._name, handles, cause), f"cancel/{handles[0]}")

    def pause(self, handle: int) -> None:
        if handle in self._jobs and self.is_open:
            self._post(Pause(lane=self._name, handle=handle), f"pause/{handle}")

    def resume(self, handle: int) -> None:
        if handle in self._jobs and self.is_open:
            self._post(Resume(lane=self._name, handle=handle), f"resume/{handle}")

    def describe(self) -> None:
        if self.is_open:
            self._post(Describe(lane=self._name), "describe")

    def probe(self) -> None:
        if not self.is_open or (self._jobs and not self.is_closing):
            return
        if self._clock.now() - self._last_sent_at >= PROBE_S:
            self._post(Cancel(self._name, [NO_JOB]), "probe")

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        await self._sessions.close()

    def reopen(self) -> None:
        if self.is_open:
            self.is_open, self.is_reopening = False, True
            self.break_off(_STALE)

    async def _session_ended(self, end: SessionEnd) -> None:
        reason = end.reason
        if end.is_closed:
            reason = "the orchestrator is stopping"
            if self.is_relieved:
                reason = "replaced after carrying as much as one stream may"
        else:
            by_sibling = self.is_reopening and end.error is None
            self.is_reopening = by_sibling or isinstance(end.error, LaneStale)
        self.is_open = self.is_closing = self.is_exhausted = self._is_leaving = False
        self._cancels.clear()
        jobs, self._jobs = self._jobs, {}
        for sink in jobs.values():
            sink.on_lost(lost())
        self._owner.lane_closed(self, reason)

    # ── one session ──────────────────────────────────────────────────────────────────────────

    async def _connect_and_read(self) -> None:
        opened = asyncio.get_running_loop().create_future()
        call: GrpcCall | None = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                call = await open_call(
                    self.address,
                    STREAM_METHOD,
                    self._take,
                    self._config.keepalive_s,
                    self._config.tls,
                    self._leave,
                )
                self._stream, self._opened = call, opened
                self._name = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
                self._post(Open(PROTOCOL_VERSION, self._name, self._config.shown_token), "open")
                await asyncio.wait([opened, call.ended], return_when=asyncio.FIRST_COMPLETED)
            await call.ended
        finally:
            self._stream = self._opened = None
            if call is not None:
                await call.close()

    def _leave(self) -> None:
        self._is_leaving = self.is_exhausted = True

    def _take(self, messages: list[bytes]) -> None:
        """Process all messages that arrived together: usually one frame. If the loop is late,
        several arrive, and a job gets its tokens from all of them at once: each event has a cost,
        and one per token would delay the loop further."""
        try:
            for message in messages:
                self._carried_bytes += _RESPONSE_BYTES + len(message)
                frame = self._frame(service_pb2.ModelStreamInferResponse.FromString(message))
                if frame is None:
                    continue
                if self._opened is not None and not self._opened.done():
                    self._take_first(frame, self._opened)
                else:
                    self._take_next(frame)
        finally:
            self._hand_on_all()

    def _take_first(self, frame: Frame, opened: "asyncio.Future[None]") -> None:
        if frame.card is None:
            raise LaneBroken("the first frame carried no model card")
        opened.set_result(None)
        self._seq = frame.seq
        self._carried_bytes = 0  # without the card, which starts each lane
        self.sessions_total += 1
        self._sessions.is_up()
        self.last_frame_at = self._clock.now()
        self.is_open = True
        self.is_reopening = False
        self._owner.lane_opened(self, frame)
        self._dispatch(frame)

    def _take_next(self, frame: Frame) -> None:
        self._seq += 1
        if frame.seq != self._seq:
            raise LaneBroken(f"expected frame {self._seq}, got {frame.seq}: tokens are missing")
        now = self.last_frame_at = self._clock.now()
        tokens = self._dispatch(frame)
        has_carried_all = self._carried_bytes >= RENEW_AFTER_BYTES
        self.is_exhausted = self._is_leaving or has_carried_all
        self._sample_emission(now, tokens)
        if (
            frame.stats is not None
            or frame.draining
            or frame.card is not None
            or frame.cache is not None
        ):
            self._owner.lane_reported(self, frame)

    def _dispatch(self, frame: Frame) -> int:
        """Pass a frame's parts to their jobs, but hold its tokens (``_hand_on_all``); returns the
        number of tokens."""
        jobs = self._jobs
        for started in frame.started:
            if (sink := jobs.get(started.handle)) is not None:
                sink.on_started(started.wait_ms)
        for handle, prompt in frame.prompts:
            if (sink := jobs.get(handle)) is not None:
                sink.on_prompt(prompt)
        for handle, cached in frame.cached:
            if (sink := jobs.get(handle)) is not None:
                sink.on_cached(cached)
        tokens = 0
        for delta in frame.deltas:
            tokens += len(delta.ids)
            if (held := self._held.get(delta.handle)) is not None:
                held.extend(delta)
            else:
                self._held[delta.handle] = delta
        for handle in frame.paused:
            self._hand_on(handle)
            if (sink := jobs.get(handle)) is not None:
                sink.on_paused()
        for handle in frame.resumed:
            self._hand_on(handle)
            if (sink := jobs.get(handle)) is not None:
                sink.on_resumed()
        for end in frame.ends:
            self._hand_on(end.handle)
            if (sink := jobs.pop(end.handle, None)) is not None:
                sink.on_ended(end)
        self.tokens_total += tokens
        self.frames_total += 1
        return tokens

    def _hand_on_all(self) -> None:
        for handle in list(self._held):
            self._hand_on(handle)

    def _hand_on(self, handle: int) -> None:
        """Pass on the held tokens of a job."""
        delta = self._held.pop(handle, None)
        if delta is not None and (sink := self._jobs.get(handle)) is not None:
            sink.on_tokens(delta, self.last_frame_at)

    def _frame(self, response: service_pb2.ModelStreamInferResponse) -> Frame | None:
        """The frame in a response; None for a response without data."""
        if response.error_message:
            self._refused(response.infer_response.id, response.error_message)
            return None
        frame = to_frame(response.infer_response)
        if frame is not None and frame.error is not None:
            raise LaneBroken(frame.error.message)
        return frame

    def _refused(self, request_id: str, message: str) -> None:
        """Handle an in-band error: of one job if the id names one, otherwise of the whole lane.
        Workers report a job's error in a frame, so this error comes from Triton, or from a worker
        that does not know this lane."""
        if _LANE_CLOSED in message:
            # From now on no job may be sent here, and the present jobs go back to the queue.
            self.is_open, self.is_reopening = False, True
            raise LaneStale(_STALE)
        head = request_id.partition("/")[0]
        job = self._jobs.pop(int(head), None) if head.isascii() and head.isdigit() else None
        if _UNAVAILABLE in message:
            # Unloaded or shutting down: running jobs may end there, but no new job gets through.
            self.is_closing = True
        elif job is None:
            raise LaneBroken(message)
        if job is not None:
            job.on_lost(InstanceLost(f"the instance could not continue this: {message}"))
        if self.is_closing and not self._jobs:
            raise LaneBroken(message)

    def _post(self, message: LaneMessage, request_id: str) -> None:
        data = to_request(message, request_id).SerializeToString()
        if self._stream is not None:  # otherwise the lane is broken and its jobs will be lost
            self._last_sent_at = self._clock.now()
            self._stream.send(data)
