"""Models that are in memory before they are used (PV-4)."""

import os
from pathlib import Path

import pytest

from catalog.errors import NoMemory
from pool.artifacts.residency import preload, residency


def test_what_was_dropped_is_in_memory_again_after_a_preload(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(3 * 2**20 + 17))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = residency([file])
    seen: list[int] = []
    found = preload([file], seen.append)
    assert found.resident == found.total == sum(seen) == 3 * 2**20 + 17
    if dropped.share == 1:
        pytest.skip("this file system keeps its files in memory, whatever it is advised")


def test_an_empty_file_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert preload([tmp_path / "empty"]).share == 1.0


def test_what_does_not_fit_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(2**20))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if residency([file]).resident:
        pytest.skip("this file system keeps its files in memory, whatever it is advised")
    with pytest.raises(NoMemory, match=r"do not fit into the 0\.0 GB"):
        preload([file], available=1000)
