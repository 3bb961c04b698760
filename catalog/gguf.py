"""Reads GGUF files: whether one is whole, and its metadata. Nothing of its weights is read.

The format is ggml's (docs/gguf.md there): magic, version, counts, key-value pairs, tensor
descriptions, then the tensors' data from the next multiple of the alignment.
"""

import struct
from pathlib import Path
from typing import BinaryIO, Final

from catalog.errors import DamagedModel

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the value types that have a fixed length."""
_UINT32: Final = 4
_MAX_DIMS: Final = 8
_MAX_TEXT_BYTES: Final = 2**24
"""Longest text outside of arrays: a chat template has 100 kB at most."""
_MAX_ENTRIES: Final = 2**20
"""Most pairs, and most tensors: a model of 10^12 parameters has thousands."""
_BLOCKS: Final = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
}
"""Elements and bytes of a block, by ggml type. Types that are not here are newer than this."""


class _Reader:
    """Reads a header without mapping the file: the kernel would end the process if a mapped file
    were cut meanwhile, or lay on a bad sector."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > _MAX_TEXT_BYTES:
            raise DamagedModel(f"its header has a text of {count} bytes")
        data = self._file.read(count)
        if len(data) < count:
            raise DamagedModel("its header goes on beyond its end: the file is cut")
        self.at += count
        return data

    def skip(self, count: int) -> None:
        if count > self._size - self.at:
            raise DamagedModel("its header goes on beyond its end: the file is cut")
        self.at = self._file.seek(self.at + count)

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        return self.take(self.u64()).decode("utf-8", "replace")

    def value(self, kind: int) -> str | int | None:
        """Read a string or an unsigned 32-bit number; skip every other value and return None."""
        if kind == _STRING:
            return self.string()
        if kind == _UINT32:
            return self.u32()
        if kind == _ARRAY:
            self._skip_array()
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise DamagedModel(f"its header has a value of the unknown type {kind}")
        return None

    def _skip_array(self, depth: int = 0) -> None:
        kind, count = self.u32(), self.u64()
        if kind in _SIZES:
            self.skip(_SIZES[kind] * count)
            return
        if kind not in (_STRING, _ARRAY) or count > self._size or depth > _MAX_DIMS:
            raise DamagedModel(f"its header has an array of {count} of type {kind}")
        for _ in range(count):
            if kind == _STRING:
                self.skip(self.u64())
            else:
                self._skip_array(depth + 1)


def read_gguf(path: Path) -> dict[str, str | int]:
    """The texts and 32-bit numbers of a GGUF file's header by key, such as ``general.license``.

    Raises ``DamagedModel`` for a file that is no GGUF, is cut, or whose tensors do not fit into it.
    """
    size = path.stat().st_size
    if size == 0:
        raise DamagedModel(f"{path.name}: it is empty")
    with path.open("rb") as file:
        try:
            return _read(_Reader(file, size), size)
        except DamagedModel as error:
            raise DamagedModel(f"{path.name}: {error}") from None


def _read(reader: _Reader, size: int) -> dict[str, str | int]:
    if reader.take(4) != _MAGIC:
        raise DamagedModel("it does not begin with GGUF, so it is no GGUF file")
    version = reader.u32()
    if version not in _VERSIONS:
        raise DamagedModel(f"its GGUF version is {version}, and known are {_VERSIONS}")
    tensors, pairs = reader.u64(), reader.u64()
    if max(tensors, pairs) > _MAX_ENTRIES:
        raise DamagedModel(f"its header tells of {pairs} pairs and {tensors} tensors")
    told: dict[str, str | int] = {}
    for _ in range(pairs):
        key = reader.string()
        value = reader.value(reader.u32())
        if value is not None:
            told[key] = value
    ends = [_tensor_end(reader) for _ in range(tensors)]
    alignment = told.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise DamagedModel(f"its alignment is {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    if ends and start + max(ends) > size:
        raise DamagedModel(
            f"its tensors need {start + max(ends)} bytes and it has {size}: the file is cut"
        )
    return told


def _tensor_end(reader: _Reader) -> int:
    """The end of a tensor's data, counted from the start of all tensors' data."""
    name = reader.string()
    dims = reader.u32()
    if dims > _MAX_DIMS:
        raise DamagedModel(f"its tensor {name} has {dims} dimensions")
    elements = 1
    for _ in range(dims):
        elements *= reader.u64()
    kind, offset = reader.u32(), reader.u64()
    per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
    return offset + -(-elements // per_block) * block_bytes
