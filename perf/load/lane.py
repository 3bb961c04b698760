"""The benchmark's own lane, directly to a worker, with minimal code in between."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.lanes.wire import to_frame, to_request
from protocol import (
    PROTOCOL_VERSION,
    End,
    Frame,
    LaneMessage,
    ModelCard,
    Open,
    Sampling,
    Started,
    Submit,
    WorkerStats,
)

_OPEN_S = 20.0
_BUDGET_MS = 300_000.0
"""Budget of every job: longer than the slowest job takes."""


class SentJob:
    """One job as its frames arrive. Times are ``perf_counter`` seconds."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.submitted_at = time.perf_counter()
        self.started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[tuple[End, float]] = asyncio.get_running_loop().create_future()


class BenchLane:
    """Submits jobs on one lane, without an orchestrator."""

    def __init__(self, card: ModelCard, name: str, outbox: asyncio.Queue[LaneMessage]) -> None:
        self.card = card
        self.stats: WorkerStats | None = None
        self._name = name
        self._outbox = outbox
        self._jobs: dict[int, SentJob] = {}
        self._handles = 0
        self._news = asyncio.Event()

    def submit(self, max_tokens: int) -> SentJob:
        """Start a greedy job of exactly ``max_tokens`` on a short prompt."""
        self._handles += 1
        job = self._jobs[self._handles] = SentJob(self._handles)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = [self.card.bos_token_id or 1, 5, 6, 7]
        self._outbox.put_nowait(
            Submit(self._name, job.handle, prompt, sampling, budget_ms=_BUDGET_MS)
        )
        return job

    async def news(self) -> WorkerStats:
        """Wait for the worker's next statistics."""
        self._news.clear()
        await self._news.wait()
        assert self.stats is not None
        return self.stats

    def take(self, frame: Frame) -> None:
        """Pass a frame's events to their jobs."""
        now = time.perf_counter()
        if frame.stats is not None:
            self.stats = frame.stats
            self._news.set()
        for started in frame.started:
            self._jobs[started.handle].started.set_result(started)
        for end in frame.ends:
            self._jobs.pop(end.handle).ended.set_result((end, now))


@asynccontextmanager
async def open_lane(address: str) -> AsyncIterator[BenchLane]:
    """A lane to the worker at ``address`` (Triton's gRPC ``host:port``), closed with the body."""
    outbox: asyncio.Queue[LaneMessage] = asyncio.Queue()
    name = f"bench-{uuid.uuid4()}"

    async def requests() -> AsyncIterator[service_pb2.ModelInferRequest]:
        yield to_request(Open(PROTOCOL_VERSION, name), "open")
        while True:
            yield to_request(await outbox.get(), "")

    async with grpc.aio.insecure_channel(address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        frames = _frames(call)
        try:
            async with asyncio.timeout(_OPEN_S):
                first = await anext(frames)
            if first.card is None:
                raise RuntimeError(f"a lane opened without a model card: {first.error}")
            lane = BenchLane(first.card, name, outbox)
            lane.take(first)
            reader = asyncio.create_task(_read(lane, frames))
            try:
                yield lane
            finally:
                reader.cancel()
                with suppress(asyncio.CancelledError, grpc.RpcError):
                    await reader
        finally:
            call.cancel()


async def _frames(call: grpc.aio.StreamStreamCall) -> AsyncIterator[Frame]:
    async for response in call:
        if response.error_message:
            raise RuntimeError(f"the worker refused the lane: {response.error_message}")
        frame = to_frame(response.infer_response)
        if frame is not None:
            yield frame


async def _read(lane: BenchLane, frames: AsyncIterator[Frame]) -> None:
    async for frame in frames:
        lane.take(frame)
