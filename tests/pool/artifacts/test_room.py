"""How much of the disk stays free, and which models are in use (PV-4)."""

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from catalog.errors import NoMemory, NoRoom
from catalog.models import ModelCatalog
from pool.artifacts.room import preload, require_room, users_of
from tests.pool.artifacts.test_staging_local import add, make_folder
from tests.support.model_files import checkpoint


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the disk one of 1000 bytes, of which so many are free."""

    def of(free: int) -> None:
        usage = shutil._ntuple_diskusage(1000, 1000 - free, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return of


def test_a_share_of_the_disk_stays_free(catalog: ModelCatalog, disk: Callable[[int], None]) -> None:
    disk(300)
    require_room(catalog, 100, 0.2)
    with pytest.raises(NoRoom, match=r"there is no room for 101 bytes: .* 1 byte more is needed"):
        require_room(catalog, 101, 0.2)
    disk(0)
    require_room(catalog, 0, 0.2)


async def test_a_model_that_a_process_reads_from_is_in_use(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    entry = await add(catalog, make_folder(tmp_path / "mine", checkpoint(5000)), copy=True)
    folder = catalog.path_of(entry)
    with (folder / "model.safetensors").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert users_of(folder) == [os.getpid()]
    mapped.close()
    assert users_of(folder) == []


def test_every_byte_of_every_file_is_read_ahead_of_its_use_if_it_fits(tmp_path: Path) -> None:
    files, sizes = [tmp_path / name for name in "abc"], (3 * 2**20 + 17, 0, 5)
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    seen: list[int] = []
    with pytest.raises(NoMemory, match=r"do not fit into the 0\.0 GB"):
        preload(files, seen.append, available=1000)
    assert not seen
    preload(files, seen.append)
    assert sum(seen) == sum(sizes)
