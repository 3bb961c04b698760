"""OR-5: a write that is cut short loses nothing and misleads nobody."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from catalog.atomic import sync_tree, write_atomically
from catalog.models import ModelCatalog, ModelEntry, ModelFormat, ModelState
from pool import bootstrap
from pool.engines import triton_wheel
from tidegate.cli.slot import save
from tidegate.errors import TidegateError

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


def stamp(path: Path) -> None:
    write_atomically(path, LONG, 0o644)


@pytest.mark.parametrize("write", [stamp, lambda path: save(path, LONG)])
@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_in_the_middle_leaves_what_was_there(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "file.mp4"
    path.write_bytes(b"old")
    with pytest.raises((OSError, TidegateError), match="No space left on device"):
        write(path)
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


def test_a_stamp_that_is_cut_short_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: None
) -> None:
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "_pip_install", lambda arguments: None)
    monkeypatch.setattr(bootstrap, "_uv_install", lambda arguments: True)
    monkeypatch.setattr(bootstrap, "_have_the_client_seen", lambda: None)
    with pytest.raises(OSError, match="No space left"):
        bootstrap.install_packages([], bootstrap._STAMP)
    assert list(tmp_path.iterdir()) == []
    assert not bootstrap._has_stamp(bootstrap._STAMP)


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


def test_a_server_gets_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "server"
    synced: list[Path] = []

    def spied(path: Path) -> None:
        assert not final.exists()
        sync_tree(path)
        synced.append(path)

    monkeypatch.setattr(triton_wheel, "sync_tree", spied)
    with pytest.raises(OSError, match="full"), triton_wheel.completing(final) as target:
        (target / "half").write_bytes(b"1")
        raise OSError("full")
    assert not final.exists() and not synced
    with triton_wheel.completing(final) as target:
        (target / "lib").mkdir()
        (target / "lib" / "a.so").write_bytes(b"1")
        (target / "lib" / "dangling").symlink_to("nowhere")
    assert synced and (final / "lib" / "a.so").read_bytes() == b"1"
