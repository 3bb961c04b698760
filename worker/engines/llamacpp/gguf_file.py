"""Reads a GGUF file's metadata and finds its split parts, without llama.cpp."""

import mmap
import re
import struct
from pathlib import Path
from typing import Final, TypeVar

from worker.errors import BrokenCheckpoint

SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_KEYS: Final = 65_536
_MAX_VALUES: Final = 2**24
"""Most values in one array: the largest vocabularies have some 10^6 merges."""
_MAX_BYTES: Final = 2**29
"""Most bytes of metadata: more could fill the memory before anything has looked at it."""
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

T = TypeVar("T")


class GgufFile:
    """The metadata of one file, or of the first of its parts. Raises ``BrokenCheckpoint``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = _read_metadata(path)
        """Metadata by key; arrays are lists."""
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str = "") -> str:
        """A string; what is not UTF-8 in it is replaced, since a card could not carry it."""
        return as_text(self._get(key, str, default))

    def texts(self, key: str) -> list[str]:
        """An array of strings; empty where the file has none."""
        found: list[str] = self._get(key, list, [])
        if not all(isinstance(one, str) for one in found):
            raise BrokenCheckpoint(
                f"{self.path}: {key} holds other values than strings; download or convert it again"
            )
        return found

    def whole(self, key: str, default: int = 0) -> int:
        return self._get(key, int, default)

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        return float(value) if isinstance(value, int | float) else None

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, bool, default)

    def of_model(self, key: str, default: int = 0) -> int:
        """A whole number under the architecture's own name, the largest if layers differ."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            return max((one for one in value if isinstance(one, int)), default=default)
        return value if isinstance(value, int) else default

    def _get(self, key: str, kind: type[T], default: T) -> T:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise BrokenCheckpoint(
                f"{self.path}: {key} is a {type(value).__name__}, expected {kind.__name__}; the"
                " file was not written as GGUF has it: download or convert it again"
            )
        return value


def as_text(piece: str) -> str:
    """``piece`` with a replacement mark for whatever is not UTF-8."""
    return piece.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def find_gguf(path: Path) -> Path:
    """The file that ``path`` names: itself, or the one model in that folder, by its first part.

    Raises ``BrokenCheckpoint``.
    """
    if path.is_file():
        return _first_part(path)
    if not path.exists():
        raise BrokenCheckpoint(f"{path} does not exist")
    models = sorted({_first_part(file) for file in path.glob(f"*{SUFFIX}")})
    if len(models) == 1:
        return models[0]
    if not models:
        raise BrokenCheckpoint(
            f"{path} has no {SUFFIX} file, which the llamacpp engine needs; for a Hugging Face"
            " checkpoint: python -m tools.to_gguf FOLDER FILE.gguf in a checkout of Tidegate, or"
            " TIDEGATE_WORKER__ENGINE=torch"
        )
    names = ", ".join(model.name for model in models[:3])
    raise BrokenCheckpoint(
        f"{path} has {len(models)} models in GGUF ({names}{', …' * (len(models) > 3)}); name one of"
        " the files as TIDEGATE_WORKER__MODEL_PATH"
    )


def parts_of(file: Path) -> list[Path]:
    """All files of a model, from its first. Raises ``BrokenCheckpoint`` where one is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    name, _, count = match.groups()
    parts = [file.with_name(f"{name}-{i + 1:05}-of-{count}{SUFFIX}") for i in range(int(count))]
    for part in parts:
        if not part.exists():
            raise BrokenCheckpoint(f"{part} is missing; download all {int(count)} parts")
    return parts


def _first_part(file: Path) -> Path:
    match = _PART.fullmatch(file.name)
    if match is None:
        return file
    return file.with_name(f"{match.group(1)}-00001-of-{match.group(3)}{SUFFIX}")


def _read_metadata(path: Path) -> dict[str, object]:
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data).metadata()
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} does not exist") from None
    except (OSError, ValueError, struct.error) as error:
        raise BrokenCheckpoint(
            f"{path} cannot be read as GGUF ({error}); download or convert it again"
        ) from error


class _Reader:
    """Reads the head of a GGUF file, front to back, little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, object]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, expected 2 or 3 (little-endian)")
        self._scalar("Q")  # tensors
        count = self._scalar("Q")
        if count > _MAX_KEYS:
            raise ValueError(f"{count} keys of metadata")
        return {self._string(): self._value(self._scalar("I")) for _ in range(count)}

    def _value(self, kind: int) -> object:
        if self._at > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES >> 20} MiB of metadata")
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"a value of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[object]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > min(_MAX_VALUES, len(self._data)):  # each takes a byte at least
            raise ValueError(f"an array of {count} values")
        if kind == _ARRAY:
            raise ValueError("an array of arrays, which no model has")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            values = list(struct.unpack_from(layout, self._data, self._at))
            self._at += struct.calcsize(layout)
            return values
        return [self._value(kind) for _ in range(count)]

    def _scalar(self, code: str) -> int:
        layout = f"<{code}"
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError("it ends within its metadata")
        if length > _MAX_BYTES:
            raise ValueError(f"a text of {length} bytes")
        text = self._data[self._at : end]
        self._at = end
        # Some vocabularies hold pieces of characters, which must neither end the load nor collide.
        return text.decode("utf-8", "surrogateescape")
