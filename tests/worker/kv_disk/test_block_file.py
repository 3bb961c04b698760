"""A file is what was written, or nothing."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.disk_tier import SMALL, content, name
from worker.kv_disk.block_file import BlockFormat

FLOATS = BlockFormat("F32", (2, 3), 24)


def read(path: Path, key: bytes = name(7), of: BlockFormat = SMALL) -> bytes | None:
    into = np.zeros(of.block_bytes, np.uint8)
    return into.tobytes() if of.read(path, key, into) else None


def test_a_block_comes_back_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "block"
    SMALL.write(path, name(7), content(1))
    assert read(path) == content(1).tobytes()
    assert path.stat().st_size == SMALL.file_bytes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["block"]


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    """WK-5: the library itself reads it."""
    path = tmp_path / "block.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    FLOATS.write(path, name(7), values.view(np.uint8).reshape(-1))
    with safe_open(path, "numpy") as file:
        assert file.metadata()["name"] == name(7).hex()
        np.testing.assert_array_equal(file.get_tensor("kv"), values)


@given(data=st.data())
def test_a_flipped_bit_anywhere_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flip") / "block"
    SMALL.write(path, name(7), content(1))
    broken = bytearray(path.read_bytes())
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(broken)
    assert read(path) is None


def test_a_truncated_or_foreign_file_is_a_miss(tmp_path: Path) -> None:
    """WK-5."""
    path = tmp_path / "block"
    SMALL.write(path, name(7), content(1))
    whole = path.read_bytes()
    for other in (b"", whole[:5], whole[:100], whole[:-1], whole + b"more"):
        path.write_bytes(other)
        assert read(path) is None
    SMALL.write(path, name(8), content(1))
    assert read(path) is None
    path.write_bytes(os.urandom(SMALL.file_bytes))
    assert read(path) is None
    BlockFormat("I8", SMALL.shape, SMALL.block_bytes).write(path, name(7), content(1))
    assert read(path) is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "block"
    SMALL.write(path, name(7), content(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        SMALL.write(path, name(7), content(2))
    assert os.listdir(tmp_path) == ["block"]
    assert read(path) == content(1).tobytes()
