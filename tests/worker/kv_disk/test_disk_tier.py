"""The disk tier as the engine uses it, with its threads run by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from protocol import Sampling, prefix_salt
from tests.support.disk_tier import SMALL, ByHand, make_store
from tests.support.engine import config
from worker.core import Job
from worker.kv_disk.base import HostMemory
from worker.kv_disk.block_file import Bytes
from worker.kv_disk.block_store import BlockStore
from worker.kv_disk.disk_tier import DiskTier
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler


class Rig:
    """Scheduler, pool, tier and files; ``restart`` loses all but the files."""

    def __init__(self, root: Path, blocks: int = 18, disk_blocks: int = 40) -> None:
        self.root = root
        self.blocks = blocks
        self.disk_blocks = disk_blocks
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.scheduler = Scheduler(
            config(max_running=3, max_waiting=3, max_step_tokens=7), BlockPool(self.blocks)
        )
        pool = np.zeros((1, self.blocks, SMALL.block_bytes), np.uint8)
        self.loading, self.saving = ByHand(), ByHand()
        self.store = make_store(self.root, self.disk_blocks)
        self.tier = DiskTier(
            self.scheduler, self.store, HostMemory(pool, SMALL), self.loading, self.saving
        )

    def submit(self, ids: list[int], max_tokens: int = 4, **job: object) -> Request:
        new = Request(
            Job(ids, Sampling(max_tokens=max_tokens), **({"deadline": math.inf} | job)),  # type: ignore[arg-type]
            submitted_at=self.now,
            own_seed=0,
        )
        self.scheduler.prefix_cache.hash_prompt(new, prefix_salt(b"m", new.job.cache_salt))
        assert self.scheduler.enqueue(new, self.now) is None
        self.tier.restore(self.scheduler.waiting, self.now)
        return new

    def step(self) -> list[Request]:
        """One step; returns who ended."""
        ended = []
        self.tier.collect(self.now)
        self.tier.restore(self.scheduler.waiting, self.now)
        plan = self.scheduler.schedule().plan
        if plan is not None:
            for row in plan.rows:
                self.scheduler.advance(row, [7] if row.samples else [])
                if len(row.request.tokens) == row.request.limit_tokens:
                    self.end(row.request)
                    ended.append(row.request)
        self.tier.spill()
        return ended

    def end(self, one: Request) -> None:
        if one.slot >= 0:
            self.tier.keep(one)
        self.scheduler.release(one)

    def finish(self, one: Request) -> Request:
        """Step until ``one`` has ended and everything is on disk."""
        for _ in range(100):
            if one in self.step():
                break
            self.loading.run()
        else:
            raise AssertionError("it never ends")
        while self.saving.tasks:
            self.saving.run()
            self.tier.collect(self.now)
        self.scheduler.check_integrity()
        return one

    def talk(self, ids: list[int], **job: object) -> Request:
        return self.finish(self.submit(ids, **job))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    for name in ("_BATCH_BYTES", "_SAVE_BYTES"):  # three blocks at a time
        monkeypatch.setattr(f"worker.kv_disk.transfers.{name}", 3 * SMALL.block_bytes)
    return Rig(tmp_path)


def test_a_conversation_goes_on_after_a_restart(rig: Rig) -> None:
    """WK-6: only the block that was not full is computed again. Without a session none is kept."""
    rig.talk(list(range(10, 30)))
    assert len(rig.store) == 0
    rig.scheduler.pool.forget()
    first = rig.talk(list(range(10, 30)), session="s")
    assert rig.tier.stats().saved_blocks == 5
    rig.restart()
    again = rig.submit([*first.tokens, 50, 51], session="s")
    assert again.loading
    rig.step()
    assert again.slot < 0, "it starts when its blocks are there"
    rig.finish(again)
    assert again.cached_tokens == 20
    assert rig.tier.stats().loaded_blocks == 5


def test_what_is_on_disk_is_not_written_again(rig: Rig) -> None:
    first = rig.talk(list(range(10, 30)), session="s")
    rig.talk([*first.tokens, 50, 51], session="s")
    assert rig.tier.stats().saved_blocks == len(rig.store) == 7


def test_what_is_being_written_is_not_written_twice(rig: Rig) -> None:
    """A text may go on after its blocks were copied, and before they are files."""
    ids = list(range(10, 26))
    for _ in range(2):
        one = rig.submit(ids, max_tokens=1, session="s")
        while one not in rig.step():
            pass
        rig.tier._unpin(list(rig.tier._saving.values()))
    assert len(rig.saving.tasks) == 2
    rig.saving.run()
    rig.tier.collect(0.0)
    assert rig.tier.stats().saved_blocks == len(rig.store) == 4


def test_two_that_want_the_same_wait_for_one_load(rig: Rig) -> None:
    first = rig.talk(list(range(10, 30)), session="s")
    rig.restart()
    one, two = rig.submit([*first.tokens, 1]), rig.submit([*first.tokens, 2])
    assert len(rig.loading.tasks) == 1
    rig.finish(one)
    rig.finish(two) if two.slot >= 0 or two in rig.scheduler.waiting else None
    assert one.cached_tokens >= 20 and two.cached_tokens >= 20


def test_only_those_near_their_turn_are_loaded_for(rig: Rig) -> None:
    """A long queue would flush its own heads out of the pool again."""
    first = rig.talk(list(range(10, 30)), session="s")
    rig.restart()
    others = [rig.submit([90 + i] * 3, max_tokens=40) for i in range(4)]
    late = rig.submit([*first.tokens, 50, 51])
    assert not late.is_looked_up
    for other in others:
        assert other.is_looked_up and not other.loading
        rig.end(other)
    rig.step()
    assert late.loading


def test_a_broken_file_is_computed_instead(rig: Rig) -> None:
    """WK-5: a miss, never an error; what comes before it is used."""
    first = rig.talk(list(range(10, 30)), session="s")
    rig.store._path(first.hashes[3]).write_bytes(b"")
    rig.restart()
    assert not rig.store.holds(first.hashes[3]), "a file of another size is not even counted"
    rig.store._path(first.hashes[2]).write_bytes(b"x" * rig.store.format.file_bytes)
    again = rig.talk([*first.tokens, 50, 51])
    assert again.cached_tokens == 8
    assert rig.tier.stats().failures == 1


@pytest.mark.parametrize(
    ("computing", "block_load_s", "left_s", "seen"),
    [
        pytest.param(None, None, math.inf, {0: True, 1.5: False}, id="it takes too long"),
        pytest.param(None, None, 0.5, {0.4: True, 0.5: False}, id="computing keeps the deadline"),
        pytest.param(None, None, 30.0, {0.4: True, 0.5: True}, id="there is time"),
        pytest.param((0.2, 20), None, math.inf, {0.15: True, 0.25: False}, id="as computing"),
        pytest.param((2.0, 20), 0.01, 1.0, {0.9: True}, id="it alone keeps the deadline"),
        pytest.param((0.001, 1000), 1.0, math.inf, {0: False}, id="it does not pay"),
        pytest.param(None, 1.0, 3.0, {0: False}, id="the deadline does not allow it"),
        pytest.param(None, 1.0, 30.0, {0: True}, id="the deadline allows it"),
    ],
)
def test_a_load_is_waited_for_while_that_pays_and_keeps_the_deadline(
    rig: Rig,
    computing: tuple[float, int] | None,
    block_load_s: float | None,
    left_s: float,
    seen: dict[float, bool],
) -> None:
    """WK-5: a stalled disk costs no deadline that computing would have kept."""
    first = rig.talk(list(range(10, 30)), session="s")
    rig.restart()
    if block_load_s is not None:
        rig.tier._loader.counts.blocks, rig.tier._loader.counts.seconds = 1, block_load_s
    if computing is not None:
        rig.scheduler.step_time.prefilled(*computing)
    again = rig.submit([*first.tokens, 50, 51], deadline=left_s)
    for rig.now, is_waited_for in seen.items():
        rig.step()
        assert again.loading == is_waited_for == (again.slot < 0)
    assert again.cached_tokens == 0


def test_what_is_about_to_be_evicted_is_saved_ahead(rig: Rig) -> None:
    """WK-5: without a session too, when empty blocks run low."""
    for start in range(10, 70, 20):
        rig.talk(list(range(start, start + 20)))
    assert 0 < len(rig.store) <= 18
    assert rig.scheduler.pool.used_count == 0


def test_tenants_find_nothing_of_each_other_on_disk(rig: Rig) -> None:
    first = rig.talk(list(range(10, 30)), session="s", cache_salt="a")
    rig.restart()
    assert rig.talk([*first.tokens, 1], session="s", cache_salt="b").cached_tokens == 0
    assert rig.talk([*first.tokens, 1], session="s", cache_salt="a").cached_tokens == 20


def test_a_long_text_is_lent_a_part_at_a_time(rig: Rig) -> None:
    """Blocks that wait to be saved are out of use: no more than a quarter of the pool."""
    one = rig.submit(list(range(10, 40)), session="s")
    while one not in rig.step():
        pass
    assert rig.scheduler.pool.used_count == 4
    rig.scheduler.pool.forget()
    rig.saving.run()
    rig.tier.collect(0.0)
    assert rig.tier.stats().saved_blocks == 4


def test_what_was_just_said_is_not_evicted_first(rig: Rig) -> None:
    rig.talk([90] * 20)
    said = rig.talk(list(range(10, 30)), session="s")
    rig.scheduler.pool.allocate(12)
    assert len(rig.scheduler.pool.match(said.hashes)) == 5


def test_closing_saves_what_is_left(rig: Rig) -> None:
    one = rig.submit(list(range(10, 40)), session="s")
    while one not in rig.step():
        pass
    rig.tier.close()
    assert rig.tier.stats().saved_blocks == 8
    assert rig.scheduler.pool.used_count == 0
    rig.tier.close()


def test_a_saver_that_breaks_gives_all_blocks_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WP-4: also those of the batches that it never came to."""

    def breaks(self: BlockStore, which: bytes, data: Bytes) -> bool:
        raise RuntimeError("broken")

    one = rig.submit([9] * 30, session="a")
    while one not in rig.step():
        rig.loading.run()
    monkeypatch.setattr(BlockStore, "write", breaks)
    while rig.saving.tasks:
        with pytest.raises(RuntimeError, match="broken"):
            rig.saving.run()
        rig.tier.collect(rig.now)
    assert rig.scheduler.pool.used_count == 0


def test_a_disk_that_hangs_costs_one_load_s_blocks(rig: Rig) -> None:
    """WK-5: not half of what is left for every conversation that comes back."""
    texts = [[9 + i] * 13 for i in range(4)]
    for i, text in enumerate(texts):
        rig.talk(text, session=str(i))
    rig.restart()
    first = rig.submit(texts[0])
    assert first.loading
    rig.now += 100.0
    rig.step()
    assert not first.loading
    reserve_blocks = len(rig.loading.tasks)
    for text in texts[1:]:
        rig.submit(text)
        rig.step()
    assert len(rig.loading.tasks) == reserve_blocks == 1
    rig.loading.run()
    rig.tier.collect(rig.now)
    rig.scheduler.check_integrity()
