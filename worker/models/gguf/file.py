"""Reads a GGUF file's metadata by their types, without llama.cpp."""

from pathlib import Path
from typing import TypeVar

from protocol.gguf import as_text, read_gguf
from worker.errors import BrokenCheckpoint

T = TypeVar("T")


class GgufFile:
    """The metadata of one file, or of the first of its parts. Raises ``BrokenCheckpoint``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.values = read_gguf(path)
            """Metadata by key; arrays are lists."""
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{path} does not exist") from None
        except (OSError, ValueError) as error:
            raise BrokenCheckpoint(
                f"{path} cannot be read as GGUF ({error}); download or convert it again"
            ) from error
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str = "") -> str:
        """A string; invalid UTF-8 is replaced, because a card could not carry it."""
        return as_text(self._get(key, str, default))

    def texts(self, key: str) -> list[str]:
        """An array of strings; empty if the file has none."""
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
