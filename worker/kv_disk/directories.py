"""Lists and removes the directories under a KV path, one per fingerprint.

A worker reads only its own. Those of other models, types, layouts or engines stay for the workers
that wrote them, and take disk space until they are removed.
"""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.log import model_log

_CODE: Final = Path(__file__).resolve().parents[2]
COMMAND: Final = f"PYTHONPATH={_CODE} {sys.executable} -m {__package__}"
"""Command that runs this package anywhere, even where ``worker`` is not on Python's path."""
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class KvDirectory:
    """A KV directory; its blocks were last written or read at ``last_used_s``, in Unix time."""

    path: Path
    bytes: int
    last_used_s: float

    def __str__(self) -> str:
        days = max(0.0, time.time() - self.last_used_s) / _DAY_S
        return f"{self.path.name}  {self.bytes / 2**30:.2f} GiB, last used {days:.1f} days ago"


def kv_directories(root: Path) -> list[KvDirectory]:
    """The KV directories under ``root``, the longest unused first. Raises ``OSError``."""
    found = [_measure(path) for path in root.iterdir() if _is_kv_directory(path)]
    return sorted(found, key=lambda one: one.last_used_s)


def remove_kv_directory(root: Path, fingerprint: str) -> KvDirectory:
    """Delete a KV directory. A worker that uses it starts over.

    Raises ``ValueError`` if it is not a KV directory, ``OSError`` when it cannot be deleted.
    """
    path = root / fingerprint
    if not (_FINGERPRINT.fullmatch(fingerprint) and _is_kv_directory(path)):
        raise ValueError(f"{path} is not a KV directory; run list to see them")
    directory = _measure(path)
    shutil.rmtree(path)
    return directory


def log_others(root: Path, own: Path) -> None:
    """Log the directories other than ``own``, and the command that removes each."""
    for directory in kv_directories(root):
        if directory.path != own:
            model_log.info(
                "KV directory of another model or engine: %s; to remove it: %s remove %s %s",
                directory,
                COMMAND,
                root,
                directory.path.name,
            )


def _is_kv_directory(path: Path) -> bool:
    is_named_so = _FINGERPRINT.fullmatch(path.name) is not None
    return is_named_so and not path.is_symlink() and (path / "blocks").is_dir()


def _measure(path: Path) -> KvDirectory:
    total, last_used_s = 0, path.stat().st_mtime
    for file in _files(path):
        with suppress(OSError):  # a live worker may evict it
            status = file.stat(follow_symlinks=False)
            total += status.st_size
            last_used_s = max(last_used_s, status.st_mtime)
    return KvDirectory(path, total, last_used_s)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
