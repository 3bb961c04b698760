"""A bare lane to Tidegate's worker: what it sends for a cancel."""

import asyncio

from protocol import AbortCause, Sampling
from tests.support.fake_worker import FakeWorker, Plan
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
