import logging
import os
import time
from pathlib import Path

import pytest

from tests.support.disk_tier import SMALL, content, make_store, name
from worker.kv_disk.__main__ import main
from worker.kv_disk.directories import kv_directories, log_others

OLD, OWN = "a" * 32, "b" * 32


@pytest.fixture
def kv_path(tmp_path: Path) -> Path:
    """One directory last used ten days ago, one used now, and things that are none."""
    for fingerprint, blocks in ((OWN, 1), (OLD, 3)):
        store = make_store(tmp_path / fingerprint)
        assert all(store.write(name(i), content(i)) for i in range(blocks))
    then = time.time() - 10 * 86_400
    for path in [*(tmp_path / OLD).rglob("*"), tmp_path / OLD]:
        os.utime(path, (then, then))
    (tmp_path / "notes").mkdir()
    (tmp_path / ("c" * 32)).mkdir()
    (tmp_path / ("d" * 32)).symlink_to(tmp_path / OWN)
    return tmp_path


def test_directories_are_listed_the_longest_unused_first(
    kv_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = kv_directories(kv_path)
    assert [one.path.name for one in found] == [OLD, OWN]
    assert [one.bytes for one in found] == [3 * SMALL.file_bytes, SMALL.file_bytes]
    assert main(["list", str(kv_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert OLD in first and "10.0 days" in first
    assert OWN in second and " 0.0 days" in second


def test_one_is_removed_by_its_fingerprint_and_nothing_else_is(
    kv_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["remove", str(kv_path), OLD]) == 0
    assert OLD in capsys.readouterr().out
    assert [one.path.name for one in kv_directories(kv_path)] == [OWN]
    for other in ("notes", "c" * 32, "d" * 32, ".", f"../{kv_path.name}/{OWN}", "e" * 32):
        assert main(["remove", str(kv_path), other]) == 1
        assert "is not a KV directory" in capsys.readouterr().err
    assert (kv_path / "notes").is_dir() and (kv_path / OWN / "blocks").is_dir()


def test_a_path_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_a_worker_logs_the_directories_of_others_and_how_to_remove_them(
    kv_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        log_others(kv_path, own=kv_path / OWN)
    (line,) = caplog.messages
    assert f"worker.kv_disk remove {kv_path} {OLD}" in line and "10.0 days" in line
