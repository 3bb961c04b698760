"""A bare lane: what it sends for a pause or a cancel, and whom it tells of one."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from orchestrator.clock import LoopClock
from orchestrator.errors import TidegateError
from orchestrator.lanes import Lane, LaneConfig, StreamLane
from protocol import AbortCause, Delta, End, Frame, OnDeadline, PromptLogprobs, Sampling
from tests.support.fake_worker import FakeWorker, Plan


class News:
    """Owner of a lane, and sink of its jobs: notes what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ids: list[int] = []
        self.end: End | None = None
        self.card_can_pause = False

    def note(self, what: str) -> None:
        self.told.append(what)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for ``done``; the test's own timeout is the limit."""
        while not done():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.002)

    def lane_opened(self, lane: Lane, first: Frame) -> None:
        assert first.card is not None
        self.card_can_pause = first.card.can_pause
        self.note("opened")

    def lane_reported(self, lane: Lane, frame: Frame) -> None: ...

    def lane_closed(self, lane: Lane, reason: str) -> None: ...

    def emission_sampled(self, seconds: float, tokens: int) -> None: ...

    def on_started(self, wait_ms: float) -> None:
        self.note("started")

    def on_prompt(self, logprobs: PromptLogprobs) -> None:
        """Nobody asks for it."""

    def on_tokens(self, delta: Delta, now: float) -> None:
        self.ids += delta.ids

    def on_paused(self) -> None:
        self.note("paused")

    def on_resumed(self) -> None:
        self.note("resumed")

    def on_ended(self, end: End) -> None:
        self.end = end
        self.note("ended")

    def on_lost(self, error: TidegateError) -> None:
        self.note("lost")


@asynccontextmanager
async def lane_to(address: str) -> AsyncIterator[tuple[Lane, News]]:
    """An open lane and its owner."""
    news = News()
    clock = LoopClock(asyncio.get_running_loop())
    lane = StreamLane(address, LaneConfig(), news, clock, random.Random(3))
    lane.start()
    try:
        await news.until(lambda: lane.is_open)
        yield lane, news
    finally:
        await lane.close()


def submit(lane: Lane, news: News, token_ids: list[int], sampling: Sampling) -> int:
    return lane.submit(
        news,
        token_ids=token_ids,
        sampling=sampling,
        budget_ms=60_000.0,
        deadline_unix_ms=0,
        on_deadline=OnDeadline.ERROR,
        correlation_id="",
    )


async def test_what_is_cancelled_in_one_instant_leaves_as_one_message(worker: FakeWorker) -> None:
    """WP-1: a thousand clients that go at once are one look of the worker, not a thousand."""
    release = asyncio.Event()
    worker.plan = lambda submitted: Plan(stall_at=1, release=release)
    async with lane_to(worker.address) as (lane, news):
        first = [submit(lane, news, [1, 2], Sampling(max_tokens=9)) for _ in range(100)]
        await news.until(lambda: len(news.ids) == 100)
        for handle in first[:98]:
            lane.cancel(handle, AbortCause.DISCONNECT)
        lane.cancel(first[98], AbortCause.CANCEL)
        await news.until(lambda: news.told.count("ended") == 99)
        sent = {cancel.cause: cancel.handles for cancel in worker.cancels}
        assert sent == {AbortCause.DISCONNECT: first[:98], AbortCause.CANCEL: [first[98]]}
        assert len(worker.cancels) == 2

        lane.cancel(first[99], AbortCause.CANCEL)
        await news.until(lambda: news.told.count("ended") == 100)
        assert worker.cancels[-1].handles == [first[99]]


async def test_a_job_cancelled_as_soon_as_it_is_submitted_is_not_overtaken(
    worker: FakeWorker,
) -> None:
    release = asyncio.Event()
    worker.plan = lambda submitted: Plan(stall_at=1, release=release)
    async with lane_to(worker.address) as (lane, news):
        for _ in range(3):
            handle = submit(lane, news, [1, 2], Sampling(max_tokens=9))
            lane.cancel(handle, AbortCause.CANCEL)
        await news.until(lambda: news.told.count("ended") == 3)
        assert [len(cancel.handles) for cancel in worker.cancels] == [3]
