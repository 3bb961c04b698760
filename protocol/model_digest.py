"""Hashes a checkpoint's contents (PF-6), fast enough for every start.

Workers put the digest in their cards, and the catalog stores it per model, so that the two match.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_CHUNK_BYTES = 64 * 2**20


def model_digest(path: Path, threads: int | None = None) -> str:
    """Hex SHA-256 over ``config.json`` and the weight files of a checkpoint directory, or over a
    single GGUF file, which contains everything.

    A file's digest is the SHA-256 over the digests of its 64 MiB chunks, so that all cores share
    the work: one core hashes 1 to 2 GB/s, too slow for large models. ``threads``: None means one
    per core, 1 only the caller's own.
    """
    weights = sorted(path.glob("*.safetensors"))
    return files_digest([path] if path.is_file() else [path / "config.json", *weights], threads)


def files_digest(files: Sequence[Path], threads: int | None = None) -> str:
    """Hex SHA-256 over the names and contents of ``files``; see ``model_digest``."""
    if threads == 1:
        return _total(files, map)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        return _total(files, pool.map)


def _total(files: Sequence[Path], each: Callable[..., Iterable[bytes]]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0")
        starts = range(0, max(1, file.stat().st_size), _CHUNK_BYTES)
        for digest in each(partial(_digest, file), starts):
            total.update(digest)
    return total.hexdigest()


def _digest(file: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(start)
        left = _CHUNK_BYTES
        while left and (piece := stream.read(min(left, 2**20))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()
