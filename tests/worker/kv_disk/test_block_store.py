import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.disk_tier import SMALL, content, make_store, name
from worker.kv_disk.block_file import BlockFormat
from worker.kv_disk.block_store import BlockStore, fingerprint


def held(store: BlockStore, upto: int = 20) -> set[int]:
    return {i for i in range(upto) if store.holds(name(i))}


def read(store: BlockStore, number: int) -> bool:
    into = np.zeros(SMALL.block_bytes, np.uint8)
    found = store.read(name(number), into)
    assert not found or into.tobytes() == content(number).tobytes()
    return found


def files(root: Path) -> int:
    return len(list(root.glob("blocks/*/*")))


def test_size_is_bounded_and_the_least_used_goes_first(tmp_path: Path) -> None:
    """WK-5; of a text that was used, its end goes before its beginning."""
    store = make_store(tmp_path, blocks=4)
    for i in range(4):
        assert store.write(name(i), content(i))
    store.touch([name(0), name(1)])
    for i in (10, 11, 12):
        assert store.write(name(i), content(i))
    assert held(store) == {0, 10, 11, 12}
    assert files(tmp_path) == 4


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    first = make_store(tmp_path)
    for i in range(3):
        first.write(name(i), content(i))
        os.utime(first._path(name(i)), ns=(i, i))
    first.touch([name(0)])
    again = make_store(tmp_path, blocks=3)
    again.write(name(9), content(9))
    assert held(again) == {0, 2, 9}


def test_a_fifth_of_the_disk_stays_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """WK-5: what others need is made room for, but nothing is thrown away in vain."""
    size = SMALL.file_bytes
    total = 100 * size
    usage = [25 * size, total]
    store = BlockStore(
        tmp_path, SMALL, most_bytes=total, usage=lambda path: (usage[0] - files(path) * size, total)
    )
    for i in range(8):
        assert store.write(name(i), content(i))
    assert held(store) == {3, 4, 5, 6, 7}
    assert "KV is not saved" not in caplog.text
    usage[0] = 10 * size
    for i in (9, 10):
        assert not store.write(name(i), content(i))
    assert held(store) == {3, 4, 5, 6, 7}
    assert caplog.text.count("KV is not saved: no room for a block in") == 1


def test_what_stays_free_of_a_large_disk_is_bounded(tmp_path: Path) -> None:
    """WK-5: 46 GB free of 252 are less than a fifth, and room enough."""
    large = make_store(tmp_path / "large", usage=(46 * 10**9, 252 * 10**9))
    assert large.write(name(1), content(1))
    for usage in ((20 * 2**30, 10**12), (19 * 10**9, 100 * 10**9)):
        full = make_store(tmp_path / str(usage), usage=usage)
        assert not full.write(name(1), content(1))


def test_what_nobody_may_read_is_taken_away(tmp_path: Path) -> None:
    """WK-12: known as gone at once, and its file soon after; other files stay."""
    store = make_store(tmp_path)
    for i in range(3):
        store.write(name(i), content(i))
    store.disregard([name(0), name(1), name(7)])
    assert held(store) == {2}
    store.remove([name(0), name(1), name(7)])
    assert held(make_store(tmp_path)) == {2}


def test_a_file_that_another_worker_evicted_is_a_miss(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.write(name(1), content(1))
    store._path(name(1)).unlink()
    assert not read(store, 1)
    assert store.failures_total == 0
    assert held(store) == set()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "blocks" / "ab"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'ab' * 32}.safetensors").write_text("too short")
    (tmp_path / "blocks" / "a file").write_text("")
    store = make_store(tmp_path)
    assert len(store) == 0
    assert (folder / "notes.txt").read_text() == "mine"


def test_fingerprints_differ_with_all_that_changes_the_content() -> None:
    formats = [SMALL, BlockFormat("I8", (1, 16), 16), BlockFormat("U8", (2, 8), 16)]
    prints = [fingerprint("m", one) for one in formats] + [fingerprint("n", SMALL)]
    assert len(set(prints)) == 4


def test_a_directory_that_vanished_is_no_room(tmp_path: Path) -> None:
    """WK-5: never an error."""

    def gone(path: Path) -> tuple[int, int]:
        raise FileNotFoundError(path)

    store = BlockStore(tmp_path, SMALL, most_bytes=10**6, usage=gone)
    assert not store.write(name(0), content(0))
    assert store.failures_total == 1


def test_what_a_killed_worker_was_writing_goes(tmp_path: Path) -> None:
    """WK-5: the size stays bounded whatever happens; a living worker's file is left alone."""
    first = make_store(tmp_path)
    assert first.write(name(0), content(0))
    folder = first._path(name(0)).parent
    old, new = (folder / f"{name(i).hex()}.safetensors.{i}.tmp" for i in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    make_store(tmp_path)
    assert [path.exists() for path in (old, new)] == [False, True]
    assert read(first, 0)


@pytest.mark.parametrize("gone", ["", "blocks"])
def test_a_directory_that_was_taken_away_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    root = tmp_path / "kv" / "model"
    store = make_store(root)
    assert store.write(name(1), content(1))
    shutil.rmtree(root / gone)
    assert store.write(name(2), content(2)) and read(store, 2)
    assert held(store) == {2}
    assert [r.getMessage() for r in caplog.records] == [
        f"KV directory {root} was removed; created it again"
    ]
    assert (root / "blocks").stat().st_mode & 0o777 == 0o700
    assert store.failures_total == 0


def test_a_directory_that_cannot_be_made_again_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kv"
    store = make_store(root)
    shutil.rmtree(root)
    root.touch()
    assert not any(store.write(name(i), content(i)) for i in range(5))
    assert store.failures_total >= 5
    assert len(caplog.records) == 1
    root.unlink()
    assert store.write(name(1), content(1)) and read(store, 1)
