"""The blocks on disk: bounded in size, with disk space left for others, in LRU eviction order.

::

    <root>/<fingerprint>/blocks/3f/3f09….safetensors     one per block, named as in memory
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from worker.kv_disk.block_file import BlockFormat, Bytes
from worker.log import engine_log

_FREE_SHARE: Final = 0.2
_MAX_FREE_BYTES: Final = 20 * 2**30
"""Maximum bytes left free for others: ``_FREE_SHARE`` of the file system (WK-5), but at most this,
because other programs' writes do not grow with the disk."""
_BLOCK_FILE: Final = re.compile(r"[0-9a-f]{64}\.safetensors")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{64}\.safetensors\.[0-9]+\.tmp")
_ABANDONED_S: Final = 600.0
"""Seconds after which an unfinished file is abandoned: no live worker writes one for that long."""

DiskUsage = Callable[[Path], tuple[int, int]]


def disk_usage(path: Path) -> tuple[int, int]:
    """Free bytes of the disk of ``path``, and its size as ``df`` counts: used and free."""
    usage = shutil.disk_usage(path)
    return usage.free, usage.used + usage.free


def fingerprint(origin: str, block_format: BlockFormat) -> str:
    """Directory name for interchangeable blocks: blocks of one model, dtype and layout."""
    facts = [origin, block_format.dtype, list(block_format.shape)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


class BlockStore:
    """The block files of one fingerprint, for any thread. Only ``holds`` and ``disregard`` do not
    access the disk."""

    def __init__(
        self,
        root: Path,
        block_format: BlockFormat,
        *,
        most_bytes: int,
        usage: DiskUsage = disk_usage,
    ) -> None:
        """Open the store. Raises ``OSError`` if ``root`` cannot be created or listed."""
        self.format = block_format
        self._root = root
        self._blocks_dir = root / "blocks"
        self._most_blocks = most_bytes // block_format.file_bytes
        self._usage = usage
        self._lock = threading.Lock()
        self._make_directory()
        self.failures_total = 0
        self._says_failures = True
        """Whether to log a failed write; False after one until a write succeeds."""
        self._says_full = True
        self._hashes = self._scan()

    def __len__(self) -> int:
        return len(self._hashes)

    def holds(self, block_hash: bytes) -> bool:
        """Whether this process believes that it has a block: its file may still be bad."""
        return block_hash in self._hashes

    def read(self, block_hash: bytes, into: Bytes) -> bool:
        """Fill ``into`` with a block. False if it is not here or its file is bad."""
        path = self._path(block_hash)
        try:
            if self.format.read(path, block_hash, into):
                return True
        except FileNotFoundError:
            pass  # another worker on this disk has evicted it
        except OSError as error:
            self._failed("read", error)
        else:
            self._failed("read", ValueError("it is not what was written"))
        self._drop(block_hash)
        return False

    def write(self, block_hash: bytes, content: Bytes) -> bool:
        """Write a block to disk, if it fits or room can be made; otherwise False. Never raises."""
        self._restore_directory()
        if not self._make_room():
            if self._says_full:
                self._says_full = False
                engine_log.warning(
                    "KV is not saved: no room for a block in %s. A fifth of its disk, 20 GiB at"
                    " most, stays free for others, and TIDEGATE_WORKER__KV__DISK_BYTES bounds the"
                    " rest",
                    self._root,
                )
            return False
        path = self._path(block_hash)
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            self.format.write(path, block_hash, content)
        except OSError as error:
            self._failed("written", error)
            return False
        self._says_failures = self._says_full = True
        with self._lock:
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        return True

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Note that a text was used. Its last blocks are evicted before its first ones."""
        for block_hash in reversed(hashes):
            with self._lock:
                if block_hash not in self._hashes:
                    continue
                self._hashes.move_to_end(block_hash)
            with suppress(OSError):
                os.utime(self._path(block_hash))

    def disregard(self, hashes: Collection[bytes]) -> None:
        """Drop these blocks from the index; their files stay until ``remove``."""
        with self._lock:
            for block_hash in hashes:
                self._hashes.pop(block_hash, None)

    def remove(self, hashes: Collection[bytes]) -> None:
        """Delete these blocks' files, even for blocks that are not held."""
        for block_hash in hashes:
            self._drop(block_hash)

    def _make_directory(self) -> None:
        self._blocks_dir.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _restore_directory(self) -> None:
        """Start over if the directory was removed (for example by a cleanup of /tmp)."""
        if self._blocks_dir.is_dir():
            return
        try:
            self._make_directory()
        except OSError as error:
            self._failed("written", error)
            return
        engine_log.warning("KV directory %s was removed; created it again", self._root)
        with self._lock:
            self._hashes.clear()

    def _make_room(self) -> bool:
        """Evict until one more block fits; False if evicting everything is not enough."""
        size = self.format.file_bytes
        while True:
            missing = self._missing_bytes()
            if missing <= 0 and len(self._hashes) < self._most_blocks:
                return True
            with self._lock:
                if not self._hashes or missing > len(self._hashes) * size:
                    return False
                block_hash = next(iter(self._hashes))
            self._drop(block_hash)

    def _missing_bytes(self) -> float:
        """Bytes to delete so that enough disk is free after one more block; inf if unknown."""
        try:
            free_bytes, total_bytes = self._usage(self._root)
        except OSError as error:
            self._failed("written", error)
            return math.inf
        spared = min(int(total_bytes * _FREE_SHARE), _MAX_FREE_BYTES)
        return spared + self.format.file_bytes - free_bytes

    def _drop(self, block_hash: bytes) -> None:
        with self._lock:
            self._hashes.pop(block_hash, None)
        with suppress(OSError):
            self._path(block_hash).unlink()

    def _path(self, block_hash: bytes) -> Path:
        text = block_hash.hex()
        return self._blocks_dir / text[:2] / f"{text}.safetensors"

    def _scan(self) -> "OrderedDict[bytes, None]":
        """Blocks that earlier workers left, in order of use. Other files are not touched."""
        found = []
        for entry in _files(self._blocks_dir):
            _remove_abandoned(Path(entry.path))
            if _BLOCK_FILE.fullmatch(entry.name):
                with suppress(OSError):
                    status = entry.stat()
                    if status.st_size == self.format.file_bytes:
                        found.append((status.st_mtime_ns, bytes.fromhex(entry.name[:64])))
        return OrderedDict((block_hash, None) for _, block_hash in sorted(found))

    def _failed(self, what: str, error: Exception) -> None:
        self.failures_total += 1
        if what == "written":
            if not self._says_failures:
                return
            self._says_failures = False
        engine_log.warning("KV block could not be %s: %s", what, error)


def _files(directory: Path) -> Iterable["os.DirEntry[str]"]:
    with os.scandir(directory) as folders:
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                with suppress(OSError), os.scandir(folder.path) as entries:
                    yield from entries


def _remove_abandoned(path: Path) -> None:
    """Delete a file that a killed worker did not finish: nothing else would delete it."""
    if _UNFINISHED.fullmatch(path.name):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()
