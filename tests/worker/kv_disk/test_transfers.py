import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.disk_tier import ByHand, content, make_store, name
from worker.kv_disk.base import HostMemory
from worker.kv_disk.block_file import BlockFormat, Bytes
from worker.kv_disk.block_store import BlockStore
from worker.kv_disk.transfers import BlockLoad, Loader

SMALL = BlockFormat("U8", (2, 8), 16)
LARGE = BlockFormat("U8", (2, 2**17), 2**18)


@pytest.mark.parametrize("of", [SMALL, LARGE], ids=["one reader", "several readers"])
@pytest.mark.parametrize("missing", [None, 0, 3])
def test_a_load_ends_at_the_first_miss(
    tmp_path: Path, of: BlockFormat, missing: int | None
) -> None:
    """WK-5: what comes before it is there, bit by bit."""
    store = make_store(tmp_path, of=of)
    for i in range(6):
        assert store.write(name(i), content(i, of))
    if missing is not None:
        store._path(name(missing)).write_bytes(b"broken")
    pool = np.zeros((2, 9, of.block_bytes // 2), np.uint8)
    done: list[BlockLoad] = []
    background = ByHand()
    loader = Loader(store, HostMemory(pool, of), background, done.append)
    blocks: Sequence[int] = [8, 2, 3, 7, 1, 0]
    loader.submit(BlockLoad([name(i) for i in range(6)], list(blocks)))
    background.run()
    loader.close(0.0)
    (load,) = done
    assert load.loaded == (6 if missing is None else missing)
    for i in range(load.loaded):
        assert pool[:, blocks[i]].tobytes() == content(i, of).tobytes()
    assert loader.counts.blocks == load.loaded
    assert (loader.block_s() > 0) == (load.loaded > 0)


def test_a_load_is_done_only_when_its_readers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WK-5: one that is still at a block behind a miss would write into the next load's rows."""
    store = make_store(tmp_path, of=LARGE)
    for i in range(1, 4):
        assert store.write(name(i), content(i, LARGE))
    at_it, go_on = threading.Event(), threading.Event()
    read = BlockStore.read

    def slow_behind_the_miss(self: BlockStore, which: bytes, into: Bytes) -> bool:
        if which == name(2):
            at_it.set()
            assert go_on.wait(60)
        elif which == name(0):
            assert at_it.wait(60)
        return read(self, which, into)

    monkeypatch.setattr(BlockStore, "read", slow_behind_the_miss)
    pool = np.zeros((2, 9, LARGE.block_bytes // 2), np.uint8)
    done = threading.Event()
    background = ByHand()
    loader = Loader(store, HostMemory(pool, LARGE), background, lambda load: done.set())
    loader.submit(BlockLoad([name(0), name(1), name(2)], [0, 1, 2]))
    thread = threading.Thread(target=background.run)
    thread.start()
    assert at_it.wait(60)
    early = done.wait(0.2)
    go_on.set()
    thread.join(60)
    loader.close(0.0)
    assert not early
    assert done.is_set()
