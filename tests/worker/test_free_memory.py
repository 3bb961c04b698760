"""A container's memory limit counts where the machine's own figures know nothing of it."""

from pathlib import Path

import pytest

from worker.free_memory import free_of_groups

GIB = 2**30


def group(folder: Path, *, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 9\n")


def own(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cgroup"
    file.write_text(text)
    return file


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    group(mount / "a" / "b", limit="max", used=GIB, cached=0)
    group(mount / "a", limit=str(4 * GIB), used=3 * GIB, cached=GIB // 2)
    assert free_of_groups(own(tmp_path, "0::/a/b\n"), mount) == 3 * GIB // 2
    group(mount / "a" / "b", limit=str(GIB), used=2 * GIB, cached=0)
    assert free_of_groups(own(tmp_path, "0::/a/b\n"), mount) == 0


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    group(mount, limit=str(2 * GIB), used=GIB, cached=0)
    for path in ("/", "/../..", "/docker/4d5e"):
        assert free_of_groups(own(tmp_path, f"0::{path}\n"), mount) == GIB


@pytest.mark.parametrize("text", ["0::/\n", "4:memory:/x\n", ""])
def test_without_limits_there_is_no_figure(tmp_path: Path, text: str) -> None:
    assert free_of_groups(own(tmp_path, text), tmp_path / "mount") is None
    assert free_of_groups(tmp_path / "nothing", tmp_path) is None
