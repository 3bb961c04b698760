"""A small disk of the run's own, which can be filled to its last byte. Root is required."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_MIB = 48
_BALLAST = "ballast"
_MIB = bytes(2**20)
_TIMEOUT_S = 10.0


class NoDisk(Exception):
    """The small disk cannot be mounted here; the message says why."""


@contextmanager
def small_disk(folder: Path, mib: int = DISK_MIB) -> Iterator[None]:
    """A disk of so many MiB (tmpfs) at ``folder`` during the body. Raises ``NoDisk``."""
    options = f"size={mib}m,mode=700"
    if why := _run("mount", "-t", "tmpfs", "-o", options, "tidegate-chaos", str(folder)):
        raise NoDisk(why)
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def fill(folder: Path) -> None:
    """Fill the disk until it takes not one byte more."""
    with open(folder / _BALLAST, "ab", buffering=0) as file:
        size = len(_MIB)
        while size:
            try:
                file.write(_MIB[:size])
            except OSError:
                size //= 2


def free(folder: Path) -> None:
    """Free the space that ``fill`` took."""
    (folder / _BALLAST).unlink(missing_ok=True)


def _run(*command: str) -> str:
    """Run ``command``; returns why it failed, empty where it went well."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return done.stderr.strip() or f"{command[0]} failed" if done.returncode else ""
