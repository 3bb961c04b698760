"""Stores one KV block as one safetensors file; the write is atomic."""

import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FORMAT: Final = "tidegate-kv-1"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Layout of a block: ``dtype`` as safetensors spells it, ``shape`` without the block axis.

    ::

        8 bytes     length of the header
        header      JSON: block hash and CRC-32 of the content, dtype and shape; of constant length
        content     shape, in C order
    """

    dtype: str
    shape: tuple[int, ...]
    block_bytes: int

    def header(self, block_hash: bytes, crc: int) -> bytes:
        """The bytes before the content, a function of the format and these arguments alone."""
        fields = {
            "__metadata__": {"format": _FORMAT, "name": block_hash.hex(), "crc32": f"{crc:08x}"},
            "kv": {
                "dtype": self.dtype,
                "shape": list(self.shape),
                "data_offsets": [0, self.block_bytes],
            },
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def file_bytes(self) -> int:
        return len(self.header(bytes(32), 0)) + self.block_bytes

    def write(self, path: Path, block_hash: bytes, content: Bytes) -> None:
        """Write the file atomically. Raises ``OSError``."""
        data = content.data.cast("B")
        _write_whole(path, [self.header(block_hash, zlib.crc32(data)), data])

    def read(self, path: Path, block_hash: bytes, into: Bytes) -> bool:
        """Fill ``into`` from ``path``; False if the file is not exactly as ``write`` wrote it.

        Raises ``OSError`` if the file does not exist or cannot be read.
        """
        data = into.data.cast("B")
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self.file_bytes:
                return False
            header = file.read(self.file_bytes - self.block_bytes)
            done = 0
            while done < len(data):
                count = file.readinto(data[done:])
                if not count:
                    return False
                done += count
        return header == self.header(block_hash, zlib.crc32(data))


def _write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write and sync a temporary file next to ``path``, then rename it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
