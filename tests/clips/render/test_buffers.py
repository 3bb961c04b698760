"""Buffers: no two clips have the same, none is lost, none is given back twice."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from clips.render.buffers import BufferPool, BufferSizes, Lease

SIZES = BufferSizes(size=8, frames=4, samples=100)
SLOTS = 3


def new_pool() -> BufferPool:
    return BufferPool(SIZES, SLOTS, torch.device("cpu"))


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


def test_buffers_are_cleared_when_asked() -> None:
    pool = new_pool()
    with pool.lease() as lease:  # type: ignore[union-attr]
        lease.audio(100).fill_(1)
    pool.clear_buffers()
    leases = [pool.lease() for _ in range(SLOTS)]
    assert not any(float(lease.audio(100).abs().max()) for lease in leases if lease)


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
TestLeasing.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
