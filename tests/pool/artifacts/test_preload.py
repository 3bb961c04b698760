"""Models that are in memory before they are used (PV-4)."""

from pathlib import Path

import pytest

from catalog.errors import NoMemory
from pool.artifacts.preload import preload


def test_every_byte_of_every_file_is_read(tmp_path: Path) -> None:
    sizes = (3 * 2**20 + 17, 0, 5)
    files = [tmp_path / str(at) for at in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    seen: list[int] = []
    preload(files, seen.append)
    assert sum(seen) == sum(sizes)


def test_what_does_not_fit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(2**20))
    seen: list[int] = []
    with pytest.raises(NoMemory, match=r"do not fit into the 0\.0 GB"):
        preload([tmp_path / "weights"], seen.append, available=1000)
    assert not seen
