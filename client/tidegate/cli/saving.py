"""Saves files in whole or not at all: a player may have an earlier one open."""

import os
from contextlib import suppress
from pathlib import Path

from tidegate.errors import TidegateError


def save(path: Path, data: bytes) -> None:
    """Replace ``path`` once all of ``data`` is on the disk. Raises ``TidegateError``, and then
    leaves an earlier file as it was."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise TidegateError(f"cannot write {path}: {error.strerror}") from error
    with suppress(OSError):  # some file systems do not sync folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
