"""OR-5: a write that is cut short loses nothing and misleads nobody."""

import errno
import os
from pathlib import Path

import pytest

from catalog.atomic import write_atomically
from catalog.models import ModelCatalog, ModelEntry, ModelFormat, ModelState

LONG = b"new " * 1000


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the first bytes of a write and no more."""
    write, taken = os.write, list[int]()

    def cut(file: int, data: bytes) -> int:
        if taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken.append(write(file, bytes(data[:10])))
        return taken[0]

    monkeypatch.setattr(os, "write", cut)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file.mp4"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(path, LONG, 0o644)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.mp4"]


def test_what_is_written_is_there_in_whole_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content before its name, its name before the call returns."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def told(file: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def renamed(old: Path, new: Path) -> None:
        seen.append("renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", told)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "a", LONG)
    assert (tmp_path / "a").read_bytes() == LONG
    assert seen == ["a.new", "renamed", tmp_path.name]


def test_a_model_gets_its_place_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were linked, and the names in its folders, which nobody had synced."""
    found = ModelCatalog(tmp_path)
    entry = ModelEntry("m-1", "m", ModelState.STAGING, ModelFormat.SAFETENSORS, "here", 1)
    staged = found.stage(entry)
    (staged / "original").mkdir()
    (staged / "original" / "params.json").write_bytes(b"{}")
    final = found.folder / "store" / entry.id
    synced: list[str] = []
    fsync = os.fsync

    def told(file: int) -> None:
        if not final.exists():
            synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), staged))
        fsync(file)

    monkeypatch.setattr(os, "fsync", told)
    found.activate(entry)
    assert {"original", "original/params.json", "."} <= set(synced)
    assert (final / "original" / "params.json").exists()
