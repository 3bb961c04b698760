"""The prefix cache of a real Triton, seen from a lane."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
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
    Submit,
    block_hashes,
    prefix_salt,
)
from tests.e2e.conftest import Stack
from tests.support.stack import Triton, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]


class TestLane:
    """A lane that keeps what frames said: ends by handle, and the cache as reported."""

    __test__ = False

    def __init__(self, address: str) -> None:
        self.name = str(uuid.uuid4())
        self.card: ModelCard | None = None
        self.cached: set[bytes] = set()
        self.ends: dict[int, End] = {}
        self.tokens: dict[int, list[int]] = {}
        self.heard = asyncio.Condition()
        self._outbox: asyncio.Queue[LaneMessage] = asyncio.Queue()
        self._channel = grpc.aio.insecure_channel(address)

    async def __aenter__(self) -> "TestLane":
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(self._requests())
        self._reader = asyncio.create_task(self._read())
        await self.until(lambda: self.card is not None)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def run(self, handle: int, ids: list[int], **options: str) -> End:
        sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        self._outbox.put_nowait(Submit(self.name, handle, ids, sampling, 60_000.0, **options))  # type: ignore[arg-type]
        await self.until(lambda: handle in self.ends)
        return self.ends[handle]

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(60), self.heard:
            await self.heard.wait_for(condition)  # type: ignore[arg-type]

    async def _requests(self) -> AsyncIterator[service_pb2.ModelInferRequest]:
        yield to_request(Open(PROTOCOL_VERSION, self.name), "open")
        while True:
            yield to_request(await self._outbox.get(), "")

    async def _read(self) -> None:
        async for response in self._call:
            assert not response.error_message
            frame = to_frame(response.infer_response)
            if frame is not None:
                async with self.heard:
                    self._take(frame)
                    self.heard.notify_all()

    def _take(self, frame: Frame) -> None:
        self.card = frame.card or self.card
        for delta in frame.deltas:
            self.tokens.setdefault(delta.handle, []).extend(delta.ids)
        self.ends |= {end.handle: end for end in frame.ends}
        if frame.cache is not None:
            known = set() if frame.cache.full else self.cached
            self.cached = (known | set(frame.cache.added)) - set(frame.cache.evicted)


async def test_wk5_a_second_identical_prompt_is_found_and_reported(demo: Stack) -> None:
    """WK-5, OR-9: the frames name the blocks as the orchestrator would."""
    ids = [7 + i % 90 for i in range(100)]
    async with TestLane(demo.triton.grpc) as lane:
        assert lane.card is not None
        size = lane.card.block_tokens
        first, again = await lane.run(1, ids), await lane.run(2, ids)
        assert (first.cached_tokens, again.cached_tokens) == (0, (len(ids) - 1) // size * size)
        assert lane.tokens[1] == lane.tokens[2]
        salted = await lane.run(3, ids, cache_salt="another tenant")
        assert salted.cached_tokens == 0
        assert lane.tokens[3] == lane.tokens[1]

        plain = block_hashes(ids, size, lane.card.hash_salt)
        apart = block_hashes(ids, size, prefix_salt(lane.card.hash_salt, "another tenant"))
        await lane.until(lambda: lane.cached >= {*plain, *apart})
    async with TestLane(demo.triton.grpc) as lane:
        await lane.until(lambda: lane.cached >= {*plain, *apart})

    def is_published() -> bool:
        metric = demo.orchestrator.metric
        spared = metric("tidegate_prompt_tokens_cached_total")
        return spared >= again.cached_tokens and metric("tidegate_kv_blocks", kind="cached") > 0

    await asyncio.to_thread(eventually, is_published, "the hits in /metrics")


@pytest.mark.slow
async def test_wk6_a_conversation_goes_on_after_triton_was_restarted(tmp_path: Path) -> None:
    """WK-6, WK-5: SIGTERM saves what is left to save; the next worker finds it."""
    disk = shutil.disk_usage(tmp_path)
    if disk.free < 0.21 * disk.total:
        pytest.skip("a fifth of this disk must stay free, so nothing is saved on it")
    ids = [7 + i % 90 for i in range(100)]
    triton = Triton(kv__disk_path=tmp_path)
    try:
        with running(triton):
            async with TestLane(triton.grpc) as lane:
                await lane.run(1, ids, session="chat")
                await lane.run(2, ids + lane.tokens[1] + ids[:20])
        with running(triton):
            async with TestLane(triton.grpc) as again:
                end = await again.run(2, ids + lane.tokens[1] + ids[:20], session="chat")
    finally:
        triton.close()
    assert end.cached_tokens == 96
    assert again.tokens[2] == lane.tokens[2]
