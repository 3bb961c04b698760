"""Reads ``/proc`` for processes that are not our children, and sends signals that cannot reach the
wrong process.

The kernel reuses a process id after its process has ended. Process id and start time together
identify one process while the machine is up.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identity of one process, also after its end. ``started_ticks`` counts from boot."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The identity of the process with this id; None if there is none."""
        fields = stat_of(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    @property
    def is_running(self) -> bool:
        """Whether the process is running (a zombie is not)."""
        fields = stat_of(self.pid)
        return (
            fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.started_ticks
        )

    def open(self) -> int | None:
        """A file descriptor of the process, which becomes readable at its end; the caller closes
        it. None if the process is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_running:  # checked after the open, so it is this process
            return fd
        os.close(fd)
        return None

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal to exactly this process; return whether it existed."""
        fd = self.open()
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def all_pids() -> Iterator[int]:
    """Ids of all visible processes."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def is_ours(pid: int) -> bool:
    """Whether a process runs as our user."""
    try:
        return (_PROC / str(pid)).stat().st_uid == os.geteuid()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def command_of(pid: int) -> list[str]:
    """A process's command line; empty if it is gone, a zombie, or not readable."""
    return [word.decode(errors="surrogateescape") for word in _read(pid, "cmdline")]


def environment_of(pid: int) -> dict[str, str]:
    """A process's initial environment; empty if it is gone or another user's."""
    entries = (word.decode(errors="surrogateescape") for word in _read(pid, "environ"))
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def kill_marked(variable: str, value: str) -> None:
    """Send SIGKILL to all processes with ``variable=value`` in the environment."""
    for pid in all_pids():
        identity = ProcessId.of(pid)
        if identity is not None and environment_of(pid).get(variable) == value:
            with contextlib.suppress(PermissionError):
                identity.send(signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process is running (a zombie is not)."""
    fields = stat_of(pid)
    return fields is not None and fields[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """Process ids of the live direct children of ``pid``."""
    return [child for child, state in _children(pid) if state not in "ZX"]


def has_ended_child(pid: int) -> bool:
    """Whether a direct child of ``pid`` has ended, but ``pid`` has not waited for it."""
    return any(state == "Z" for _, state in _children(pid))


def _children(pid: int) -> list[tuple[int, str]]:
    """Direct children, each with its state from ``/proc/PID/stat``."""
    found = ((child, stat_of(child)) for child in all_pids())
    return [(child, fields[0]) for child, fields in found if fields and int(fields[1]) == pid]


def stat_of(pid: int) -> list[str] | None:
    """Fields after the command (proc_pidstat_of(5)), the state first; None if gone or hidden."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: hidepid=1
        return None


def _read(pid: int, name: str) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        data = (_PROC / str(pid) / name).read_bytes()
        return [word for word in data.split(b"\0") if word]
    return []
