"""What a model may take of the disk, and who has to go for it (PV-4)."""

from pathlib import Path

import pytest

from catalog.errors import NoRoom
from catalog.model_entry import ModelEntry, ModelFormat, ModelState
from catalog.models import ModelCatalog
from pool.artifacts.room import (
    DiskBudget,
    DiskState,
    Kept,
    make_room,
    to_remove,
    users_of,
)
from pool.artifacts.sizes import size
from tests.pool.artifacts.test_staging_local import add, make_folder
from tests.support.model_files import checkpoint


def kept(name: str, used_ms: int, count: int) -> Kept:
    return Kept(
        ModelEntry(
            id=name,
            name=name,
            state=ModelState.ACTIVE,
            format=ModelFormat.GGUF,
            source="",
            created_ms=1,
            used_ms=used_ms,
        ),
        count,
    )


OLD, NEW, LINKED = kept("old", 10, 50), kept("new", 20, 50), kept("linked", 5, 0)
ALL = (NEW, OLD, LINKED)


@pytest.mark.parametrize(
    ("needed", "disk", "budget", "going"),
    [
        (100, DiskState(1000, 300, 0), DiskBudget(0.2), []),
        (101, DiskState(1000, 300, 0), DiskBudget(0.2), ["old"]),
        (151, DiskState(1000, 300, 0), DiskBudget(0.2), ["old", "new"]),
        (100, DiskState(1000, 900, 100), DiskBudget(0.2, 150), ["old"]),
        (0, DiskState(1000, 0, 0), DiskBudget(0.2), []),
    ],
)
def test_the_least_recently_used_go_first_and_no_more_than_needed(
    needed: int, disk: DiskState, budget: DiskBudget, going: list[str]
) -> None:
    assert [each.entry.name for each in to_remove(needed, disk, budget, ALL)] == going


def test_where_all_of_them_are_not_enough_nothing_goes() -> None:
    with pytest.raises(NoRoom, match=r"there is no room for 201 B: .* 1 B are lacking"):
        to_remove(201, DiskState(1000, 300, 0), DiskBudget(0.2), ALL)


async def test_what_would_be_removed_is_said_first(catalog: ModelCatalog, tmp_path: Path) -> None:
    entry = await add(catalog, make_folder(tmp_path / "mine"), copy=True)
    tight = DiskBudget(0.0, most_bytes=2**20)
    with pytest.raises(NoRoom, match=r"only without mine \(1\.1 MB\), .* --yes removes that"):
        make_room(catalog, 1000, tight, agreed=False)
    assert catalog.get("mine") == entry
    make_room(catalog, 1000, tight, agreed=True)
    assert catalog.entries() == ()


async def test_a_model_that_a_process_reads_from_is_kept(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    import mmap
    import os

    entry = await add(catalog, make_folder(tmp_path / "mine", checkpoint(5000)), copy=True)
    folder = catalog.path_of(entry)
    with (folder / "model.safetensors").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert users_of(folder) == [os.getpid()]
    with pytest.raises(NoRoom, match="even without every model that nobody uses"):
        make_room(catalog, 1000, DiskBudget(0.0, most_bytes=1000), agreed=True)
    mapped.close()
    assert users_of(folder) == []


def test_sizes_are_shown() -> None:
    assert [size(0), size(999), size(1500), size(4_400_000_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "4.4 GB",
    ]
