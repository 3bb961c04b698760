"""A name for a checkpoint's contents (PF-6), quick enough to take at every start.

Workers put it in their cards, and the catalog of models beside each model, so that one is known by
the other.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK_BYTES = 64 * 2**20


def model_digest(path: Path) -> str:
    """Hex SHA-256 over ``config.json`` and the weight files of a checkpoint directory; over a GGUF
    file alone, which has everything.

    A file's digest is the SHA-256 over those of its 64 MiB chunks, so that all cores share the
    work: one core hashes 1 to 2 GB/s, which a large model would feel at every start.
    """
    return files_digest([path] if path.is_file() else [path / "config.json", *_weights(path)])


def files_digest(files: Sequence[Path]) -> str:
    """The same over these files."""
    total = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file in files:
            total.update(file.name.encode() + b"\0")
            for digest in pool.map(lambda chunk: _digest(*chunk), _chunks(file)):
                total.update(digest)
    return total.hexdigest()


def _weights(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def _chunks(file: Path) -> Iterator[tuple[Path, int]]:
    return ((file, start) for start in range(0, max(1, file.stat().st_size), _CHUNK_BYTES))


def _digest(file: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(start)
        left = _CHUNK_BYTES
        while left and (piece := stream.read(min(left, 2**20))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()
