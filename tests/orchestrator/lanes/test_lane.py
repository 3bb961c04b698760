"""A bare lane to Tidegate's worker: what it sends for a cancel, what it hands on."""

import asyncio

import pytest
from tritonclient.grpc import service_pb2

from orchestrator.lanes.lane import LaneBroken, StreamLane
from orchestrator.lanes.wire import to_answered_request
from protocol import AbortCause, Delta, Drain, End, FinishReason, Frame, Sampling, encode
from tests.support.fake_worker import EMPTY_FINAL, FakeWorker, Plan
from tests.support.lanes import News, lane_to, submit

LONG = Sampling(max_tokens=9)


async def test_what_is_cancelled_in_one_instant_leaves_as_one_message(worker: FakeWorker) -> None:
    """WP-1: a thousand clients that go at once are one look of the worker, not a thousand."""
    release = asyncio.Event()
    worker.plan = lambda submitted: Plan(stall_at=1, release=release)
    async with lane_to(worker.address) as (lane, news):
        jobs = [News() for _ in range(100)]
        handles = [submit(lane, job, LONG) for job in jobs]
        await news.until(lambda: all(job.ids for job in jobs))
        for handle in handles[:98]:
            lane.cancel(handle, AbortCause.DISCONNECT)
        lane.cancel(handles[98], AbortCause.CANCEL)
        await news.until(lambda: all(job.ends for job in jobs[:99]))
        sent = {cancel.cause: cancel.handles for cancel in worker.cancels}
        assert sent == {AbortCause.DISCONNECT: handles[:98], AbortCause.CANCEL: [handles[98]]}
        assert len(worker.cancels) == 2

        lane.cancel(handles[99], AbortCause.CANCEL)
        await news.until(lambda: bool(jobs[99].ends))
        assert worker.cancels[-1].handles == [handles[99]]


async def test_a_job_cancelled_as_soon_as_it_is_submitted_is_not_overtaken(
    worker: FakeWorker,
) -> None:
    release = asyncio.Event()
    worker.plan = lambda submitted: Plan(stall_at=1, release=release)
    async with lane_to(worker.address) as (lane, news):
        jobs = [News() for _ in range(3)]
        for job in jobs:
            lane.cancel(submit(lane, job, LONG), AbortCause.CANCEL)
        await news.until(lambda: all(job.ends for job in jobs))
        assert [len(cancel.handles) for cancel in worker.cancels] == [3]


async def test_tokens_that_come_together_are_handed_on_together(worker: FakeWorker) -> None:
    """LB-1: a loop that is late is not made later by an event for every token."""
    worker.plan = lambda submitted: Plan(stall_at=0, release=asyncio.Event())
    async with lane_to(worker.address) as (lane, news):
        assert isinstance(lane, StreamLane)
        one, two = Batches(), Batches()
        first, second = submit(lane, one, LONG), submit(lane, two, LONG)
        await news.until(lambda: one.started == two.started == 1)
        seq = lane._seq
        frames = [
            Frame(seq + 1, deltas=[Delta(first, [1], ["a"]), Delta(second, [7], ["x"])]),
            Frame(seq + 2, deltas=[Delta(first, [2, 3], ["b", "c"])], paused=[second]),
            Frame(seq + 3, deltas=[Delta(first, [4], ["d"])], resumed=[second]),
            Frame(seq + 4, deltas=[Delta(second, [8], ["y"])], ends=[ended(first, 4)]),
        ]
        lane._take([message(frame) for frame in frames])
        assert one.batches == [[1, 2, 3, 4]] and one.text == "abcd" and one.is_over
        assert two.batches == [[7], [8]], "what came before the pause is told before it"
        with pytest.raises(LaneBroken, match="tokens are missing"):
            lane._take(
                [message(Frame(seq + n, deltas=[Delta(second, [9], ["z"])])) for n in (5, 7)]
            )
        assert two.batches[-1] == [9], "what has come is not lost with the lane"


async def test_what_triton_drops_before_dispatch_is_lost_once(worker: FakeWorker) -> None:
    """As from 2.74 on: it says so of that job, or nothing comes until the stream ends."""
    plans = [Plan(in_band_error="Request was cancelled"), Plan(stall_at=1), Plan(die_at=0)]
    worker.plan = lambda submitted: plans[len(worker.submits) - 1]
    async with lane_to(worker.address) as (lane, news):
        refused, running, ignored = jobs = [News() for _ in plans]
        submit(lane, refused, LONG)
        submit(lane, running, LONG)
        await news.until(lambda: bool(refused.lost and running.ids))
        assert lane.is_open and lane.load == 1
        worker.silent = True
        submit(lane, ignored, LONG)
        await news.until(lambda: bool(news.closed))
        worker.silent = False
        await news.until(lambda: lane.is_open)
        assert lane.load == ignored.started == 0
        assert [len(job.lost) for job in jobs] == [1, 1, 1]


def test_triton_takes_the_one_reserved_parameter_that_is_sent() -> None:
    """The fake worker refuses all others, in every test."""
    assert set(to_answered_request(Drain(1.0), "llm").parameters) == {EMPTY_FINAL}


class Batches(News):
    """Notes which tokens were told together."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def on_tokens(self, delta: Delta, now: float) -> None:
        super().on_tokens(delta, now)
        self.batches.append(delta.ids)


def ended(handle: int, tokens: int) -> End:
    return End(handle, FinishReason.LENGTH, 5, tokens)


def message(frame: Frame) -> bytes:
    """As it comes over the stream."""
    data = encode(frame)
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    return bytes(response.SerializeToString())
