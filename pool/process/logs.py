"""Size-limited log files of supervised processes, and their last lines.

Only the owner may read them. The processes write directly, so none waits for the launcher. A log
larger than ``LOG_BYTES`` is copied to ``….1`` and truncated, as with logrotate's ``copytruncate``.
The processes append, so they continue at the new start. A line written between the copy and the
truncation is lost.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from catalog.errors import LogUnusable

LOG_BYTES = 16 * 2**20
KEPT_LOGS = 3
"""Number of earlier logs kept next to the current one; ``….1`` is the latest."""
LOOK_S = 1.0

_LOAD_FAILED = re.compile(r"failed to load '([^']+)' version \d+: [^:]+: (.*?)\"?$", re.MULTILINE)
_ERROR_LINE = re.compile(r"^(?:E\d{4} \S+ +\d+ [\w.]+:\d+\]|error:) *(.*)$", re.MULTILINE)
_SHELL_LINE = re.compile(r"^bash: (?:line \d+: )?(.*)$", re.MULTILINE)
_HARMLESS = frozenset({"CudaDriverHelper has not been initialized."})
"""Errors that any Triton logs on a machine without a GPU."""
_ABORTED = re.compile(r"^terminate called .*$(?:\n *what\(\): .*$)?", re.MULTILINE)
_USAGE = re.compile(r"^(.+)\nUsage: ", re.MULTILINE)
_LOCATION = re.compile(r"\n+At:\n.*", re.DOTALL)
_TAIL_BYTES = 64 * 1024


def fresh_log(path: Path, remedy: str = "") -> None:
    """Start an empty log, and keep the last run's as ``….1``. Raises ``LogUnusable``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            _make_room(path)
            path.replace(_earlier(path, 1))
        open_log(path).close()
    except OSError as error:
        raise LogUnusable(
            f"cannot write the log {path}: {error.strerror}; make its directory writable or choose "
            f"another one with TIDEGATE_HOME{remedy}"
        ) from error


def require_writable(directory: Path) -> None:
    """Create a directory for logs. Raises ``LogUnusable`` if it is not writable."""
    fresh_log(directory / f".check-{os.getpid()}", ", or give --log-to-stderr")
    with suppress(OSError):
        (directory / f".check-{os.getpid()}").unlink()


def usable_log(path: Path | None, warn: Callable[[str], None]) -> Path | None:
    """``path`` with a fresh log. If that fails, calls ``warn`` and returns None (stderr)."""
    if path is None:
        return None
    try:
        fresh_log(path)
    except LogUnusable as error:
        warn(f"{error}; until its next start it logs to stderr")
        return None
    return path


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to, readable by its owner only. Raises ``OSError``."""

    def private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    return open(path, "ab", opener=private)


def ignore(text: str) -> None:
    """A callback that does nothing."""


async def keep_bounded(path: Path) -> None:
    """Limit the size of a growing log, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(bound_log, path)


def bound_log(path: Path) -> None:
    """Rotate ``path`` if it is larger than ``LOG_BYTES``. Never raises. If no copy can be kept, for
    example on a full disk, the limit still holds."""
    with suppress(OSError):
        if path.stat().st_size <= LOG_BYTES:
            return
        kept = _earlier(path, 1)
        try:
            _make_room(path)
            with path.open("rb") as source, open_log(kept) as copy:
                shutil.copyfileobj(source, copy)
        except OSError:
            kept.unlink(missing_ok=True)
        finally:
            os.truncate(path, 0)


def _make_room(path: Path) -> None:
    """Free the name ``….1``: rename each earlier log to the next number, over the oldest."""
    for age in range(KEPT_LOGS - 1, 0, -1):
        with suppress(FileNotFoundError):
            _earlier(path, age).replace(_earlier(path, age + 1))


def _earlier(path: Path, age: int) -> Path:
    return path.with_name(f"{path.name}.{age}")


def tail(path: Path, lines: int = 5) -> str:
    """The last ``lines`` lines that are not blank; empty if there is no log."""
    return "\n".join([line for line in _read_tail(path).splitlines() if line.strip()][-lines:])


def why_triton_ended(path: Path) -> str:
    """The useful part of a Triton log: the error of a model's ``initialize``, else the reason why a
    shell could not start its process, the abort message of the server, or the errors."""
    text = _read_tail(path)
    if load := _LOAD_FAILED.search(text):
        reason = load[2].replace("\\n", "\n").replace('\\"', '"')
        return f"model {load[1]}: {_LOCATION.sub('', reason).strip()}"
    if usage := _USAGE.search(text):
        return usage[1]
    if shell := _SHELL_LINE.search(text):
        return f"a model's Python process could not be started: {shell[1]}"
    if aborted := _ABORTED.search(text):
        return aborted[0]
    errors = [match[1].strip('" ') for match in _ERROR_LINE.finditer(text)]
    told = [error for error in errors if error not in _HARMLESS]
    return "\n".join(told[-3:]) or tail(path)


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
