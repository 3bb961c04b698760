"""What this process has mapped of shared memory is for its owner only."""

import mmap
from pathlib import Path

from worker.service.triton_request import restrict_shared_memory


def test_mapped_regions_are_for_their_owner_only(tmp_path: Path) -> None:
    for name in ("mapped", "with a space", "not_mapped"):
        (tmp_path / name).write_bytes(bytes(4096))
        (tmp_path / name).chmod(0o644)
    with (
        (tmp_path / "mapped").open("r+b") as one,
        (tmp_path / "with a space").open("r+b") as two,
        mmap.mmap(one.fileno(), 4096),
        mmap.mmap(two.fileno(), 4096),
    ):
        restrict_shared_memory(directory=f"{tmp_path}/")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"mapped": 0o600, "with a space": 0o600, "not_mapped": 0o644}


def test_what_cannot_be_restricted_is_no_error(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    restrict_shared_memory(maps)
    maps.write_text(
        f"7f00-7f01 rw-s 0 00:01 5     {tmp_path}/gone (deleted)\n7f00-7f01 rw-p 0 0 0\n"
    )
    restrict_shared_memory(maps, f"{tmp_path}/")
