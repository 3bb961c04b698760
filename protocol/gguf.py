"""Finds GGUF files and reads a file's header: its metadata, and whether its tensors fit in the
file. It reads no weights.

The format is ggml's (docs/gguf.md there): magic, version, counts, key-value pairs, tensor
descriptions, then the tensors' data from the next multiple of the alignment. The reader trusts no
number in the file.
"""

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS: Final = 8
_MAX_ENTRIES: Final = 2**20
"""Maximum number of pairs and of tensors: a model of 10^12 parameters has thousands."""
_MAX_TEXT_BYTES: Final = 2**24
"""Maximum bytes of a text: a chat template has at most 100 kB."""
_MAX_VALUES: Final = 2**24
"""Maximum number of values in an array: the largest vocabularies have about 10^6 merges."""
_MAX_BYTES: Final = 2**29
"""Maximum bytes of a header: a longer one could fill the memory before any check."""

_PLAIN: Final = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}
_OF_32: Final = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 36, 20: 18, 39: 17}
_OF_256: Final = {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74} | (
    {18: 98, 19: 50, 21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66}
)
_BLOCKS: Final = {
    kind: (elements, size)
    for elements, sizes in ((1, _PLAIN), (32, _OF_32), (256, _OF_256))
    for kind, size in sizes.items()
}
"""Elements and bytes per block, by ggml type. Types not listed are newer than this table."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` in PyTorch's order, ``kind`` is ggml's type number. ``row_bytes`` is 0
    if the type is not in ``_BLOCKS``."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    row_bytes: int


def read_gguf(path: Path) -> dict[str, object]:
    """Read the metadata of a GGUF file by key; arrays are lists. Bytes of a text that are not UTF-8
    become surrogates (``as_text``). Raises ``OSError``, and ``ValueError`` for a file that is not
    GGUF, is truncated, or whose tensors do not fit in it."""
    return _read(path)[0]


def read_tensors(path: Path) -> list[GgufTensor]:
    """The tensors of one file. Raises the same errors as ``read_gguf``."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, object], list[GgufTensor]]:
    size = path.stat().st_size
    if size == 0:
        raise ValueError("it is empty")
    # Read, not memory-mapped: the kernel would kill the process if a mapped file shrank during the
    # read.
    with path.open("rb") as file:
        return _Header(path, file, size).read()


def as_text(piece: str) -> str:
    """``piece`` with replacement characters for bytes that are not UTF-8."""
    return piece.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def is_gguf(model: Path) -> bool:
    """Whether a model's path is a GGUF file, or a folder with one and without a checkpoint."""
    if model.suffix == ".gguf":
        return True
    return not (model / "config.json").exists() and any(model.glob("*.gguf"))


def gguf_name(file: Path) -> str:
    """The model's name: the file name without its part number."""
    match = _PART.fullmatch(file.name)
    return file.stem if match is None else match[1]


def find_gguf(path: Path) -> Path:
    """The file that ``path`` names: itself, or the first part of the only model in that folder.

    Raises ``ValueError``.
    """
    if path.is_file():
        return _first_part(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    models = sorted({_first_part(file) for file in path.glob("*.gguf")})
    if len(models) == 1:
        return models[0]
    if not models:
        raise ValueError(
            f"{path} has no .gguf file, which llama.cpp's server needs; a Hugging Face checkpoint"
            " is read by the engines torch and vllm"
        )
    names = ", ".join(model.name for model in models[:3])
    raise ValueError(
        f"{path} has {len(models)} models in GGUF ({names}{', …' * (len(models) > 3)}); name one of"
        " the files"
    )


def parts_of(file: Path) -> list[Path]:
    """All files of a model, given the first. Raises ``ValueError`` if one is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    name, _, count = match.groups()
    parts = [file.with_name(f"{name}-{i + 1:05}-of-{count}.gguf") for i in range(int(count))]
    for part in parts:
        if not part.exists():
            raise ValueError(f"{part} is missing; download all {int(count)} parts")
    return parts


def _first_part(file: Path) -> Path:
    match = _PART.fullmatch(file.name)
    return file if match is None else file.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")


class _Header:
    """Reads a header front to back, little-endian."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._at = 0

    def read(self) -> tuple[dict[str, object], list[GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF, so it is not a GGUF file")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"unsupported GGUF version {version}: supported are 2 and 3")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        if max(tensors, pairs) > _MAX_ENTRIES:
            raise ValueError(
                f"its header states {pairs} pairs and {tensors} tensors, more than models have"
            )
        values = {self._text(): self._value(self._scalar("I")) for _ in range(pairs)}
        found = [self._tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        needed = start + max((end for _, end in found), default=0)
        if tensors and needed > self._size:
            raise ValueError(
                f"its tensors need {needed} bytes and it has {self._size}: the file is cut"
            )
        return values, [replace(each, offset=start + each.offset) for each, _ in found]

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"its header has a value of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[object]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _ARRAY:
            raise ValueError("its header has an array of arrays, which no model has")
        if count > min(_MAX_VALUES, self._size):  # each takes a byte at least
            raise ValueError(f"its header has an array of {count} values")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
        return [self._value(kind) for _ in range(count)]

    def _tensor(self) -> tuple[GgufTensor, int]:
        """A tensor and the end of its data, both counted from the start of all tensors' data."""
        name, dims = self._text(), self._scalar("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"its tensor {name} has {dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
        end = offset + -(-math.prod(shape) // per_block) * block_bytes
        row_bytes = -(-shape[-1] // per_block) * block_bytes if shape else 0
        return GgufTensor(self._path, name, shape, kind, offset, row_bytes), end

    def _scalar(self, code: str) -> int:
        layout = f"<{code}"
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return value  # type: ignore[no-any-return]

    def _text(self) -> str:
        # Some vocabularies contain parts of characters, which must not fail the load or collide.
        return self._take(self._scalar("Q"), _MAX_TEXT_BYTES).decode("utf-8", "surrogateescape")

    def _take(self, count: int, most: int = _MAX_BYTES) -> bytes:
        if count > self._size - self._at:
            raise ValueError("its header is longer than the file: the file is cut")
        if count > most:
            raise ValueError(f"its header has a text of {count} bytes")
        if self._at + count > _MAX_BYTES:
            raise ValueError(f"its header has more than {_MAX_BYTES >> 20} MiB")
        self._at += count
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError("it was cut while it was read")
        return data
