from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.worker.kv.harness import ByHand, content, make_store, name
from worker.kv.files import BlockFormat
from worker.kv.load import Load, Loader
from worker.kv.memory import HostMemory

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
    done: list[Load] = []
    background = ByHand()
    loader = Loader(store, HostMemory(pool, of), background, done.append)
    blocks: Sequence[int] = [8, 2, 3, 7, 1, 0]
    loader.submit(Load([name(i) for i in range(6)], list(blocks)))
    background.run()
    loader.close(0.0)
    (load,) = done
    assert load.loaded == (6 if missing is None else missing)
    for i in range(load.loaded):
        assert pool[:, blocks[i]].tobytes() == content(i, of).tobytes()
    assert loader.counts.blocks == load.loaded
    assert loader.counts.missed == 6 - load.loaded
    assert (loader.block_s() > 0) == (load.loaded > 0)
