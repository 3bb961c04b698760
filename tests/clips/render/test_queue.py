"""Who gets buffers next, and that none are lost on the way."""

import asyncio

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from clips.render.buffers import BufferPool, BufferSizes, Lease
from clips.render.errors import OutOfTime
from clips.render.queue import ClipQueue

LONG = 1e9
SIZES = BufferSizes(size=8, frames=4, samples=100)
SLOTS = 3


def new_pool(slots: int = SLOTS) -> BufferPool:
    return BufferPool(SIZES, slots, torch.device("cpu"))


def new_queue(slots: int = 1) -> tuple[BufferPool, ClipQueue]:
    pool = new_pool(slots)
    return pool, ClipQueue(pool, now=lambda: 0.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_least_slack_is_first() -> None:
    pool, queue = new_queue()
    first = await queue.acquire(LONG, 1.0, LONG)
    order: list[str] = []

    async def wait(name: str, start_by: float) -> None:
        lease = await queue.acquire(start_by, 1.0, LONG)
        order.append(name)
        queue.release(lease)

    tasks = [
        asyncio.create_task(wait(name, LONG + at)) for name, at in (("c", 3), ("a", 1), ("b", 2))
    ]
    await settle()
    assert (queue.waiting, queue.running, pool.free) == (3, 1, 0)
    queue.release(first)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"] and pool.free == 1 and queue.running == 0


async def test_it_gives_up_when_its_turn_does_not_come_and_not_before() -> None:
    pool, queue = new_queue()
    first = await queue.acquire(LONG, 1.0, LONG)
    with pytest.raises(OutOfTime, match="queue: its turn did not come"):
        await queue.acquire(0.0, 1.0, 0.0)
    # Less than all of it would do: it waits on, in the same place.
    patient = asyncio.create_task(queue.acquire(0.0, 1.0, give_up_at=LONG))
    await settle()
    queue.release(first)
    queue.release(await patient)
    assert pool.free == 1 and queue.waiting == 0


async def test_what_was_just_handed_to_one_that_left_goes_to_the_next() -> None:
    pool, queue = new_queue()
    first = await queue.acquire(LONG, 1.0, LONG)
    leaver, stayer = (asyncio.create_task(queue.acquire(LONG + at, 1.0, LONG)) for at in (1, 2))
    await settle()
    queue.release(first)  # the lease is the leaver's now, who has not run since
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    lease: Lease = await stayer
    queue.release(lease)
    assert pool.free == 1 and queue.running == 0


async def test_waits_are_foretold() -> None:
    _, queue = new_queue(slots=2)
    assert queue.wait_s(10.0, 4.0) == 0.0
    leases = [await queue.acquire(LONG, takes_s, LONG) for takes_s in (2.0, 5.0)]
    assert queue.wait_s(10.0, 4.0) == 2.0
    waiting = asyncio.create_task(queue.acquire(5.0, 4.0, give_up_at=LONG))
    await settle()
    assert queue.wait_s(10.0, 4.0) == 5.0, "the one before it has the first that is free"
    assert queue.wait_s(1.0, 4.0) == 2.0, "this one is more urgent"
    for lease in leases:
        queue.release(lease)
    queue.release(await waiting)


def test_views_share_the_memory_that_was_taken_once() -> None:
    pool = new_pool()
    lease = pool.lease()
    assert lease is not None
    video, audio, actor = lease.video(3, 8), lease.audio(50), lease.actor(4)
    assert (video.shape, audio.shape, actor.shape) == ((3, 3, 8, 8), (50,), (3, 4, 4))
    assert video.data_ptr() == lease.video(1, 4).data_ptr()
    assert pool.bytes == SLOTS * (4 * 3 * 64 + 4 * 3 * 64 + 400)
    with pytest.raises(ValueError, match="does not fit"):
        lease.video(5, 8)


class Leasing(RuleBasedStateMachine):
    """Any order of leasing, writing and giving back, doubly too."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool()
        self.open: dict[Lease, int] = {}
        self.marks = 0

    @rule(target=leases)
    def lease(self) -> Lease | None:
        lease = self.pool.lease()
        assert (lease is None) == (len(self.open) == SLOTS)
        if lease is not None:
            self.marks += 1
            self.open[lease] = self.marks
            lease.audio(100).fill_(self.marks)
        return lease

    @rule(lease=consumes(leases), again=st.booleans())
    def give_back(self, lease: Lease | None, again: bool) -> None:
        if lease is None:
            return
        lease.close()
        self.open.pop(lease, None)
        if again:
            lease.close()

    @invariant()
    def nobody_wrote_into_anothers(self) -> None:
        assert self.pool.free == SLOTS - len(self.open)
        for lease, mark in self.open.items():
            assert float(lease.audio(100).min()) == float(lease.audio(100).max()) == mark


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
