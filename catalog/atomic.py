"""Writes files and folders atomically, even if a write is interrupted.

Content gets its final name only once it is on disk. Standard library only: the setup of a checkout
uses this module before any package is installed.
"""

import os
from contextlib import suppress
from pathlib import Path

UNFINISHED = ".new"
"""Suffix of a file that is being written; a killed process's leftover is useless."""


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace ``path``: after a crash it has the old or the new content. Its mode is ``mode``,
    regardless of the umask.

    Only one writer at a time may do this. Raises ``OSError``, leaving the old content.
    """
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            os.fchmod(file, mode)
            write_all(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_all(file: int, content: bytes) -> None:
    """Write all of ``content`` to an open file: one call may write a part. Raises ``OSError``."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def sync_folder(path: Path) -> None:
    """Flush a folder's own entries (the names in it) to the disk."""
    _sync(path, os.O_DIRECTORY)


def sync_tree(path: Path) -> None:
    """Flush everything below a folder to the disk, before the folder gets its final name."""
    for folder, _, names in os.walk(path):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                _sync(Path(folder, name))
        sync_folder(Path(folder))


def _sync(path: Path, flags: int = 0) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)
