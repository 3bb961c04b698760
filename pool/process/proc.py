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
_HIDDEN = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors for a process that is gone, or hidden (``hidepid=1``)."""


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
        return is_running(self.pid) and ProcessId.of(self.pid) == self

    @contextlib.contextmanager
    def open(self) -> Iterator[int | None]:
        """A file descriptor of the process, which becomes readable at its end; None if it has
        ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield fd if self.is_running else None  # checked after the open, so it is this process
        finally:
            os.close(fd)

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal to exactly this process; return whether it existed."""
        with contextlib.suppress(ProcessLookupError), self.open() as fd:
            if fd is not None:
                signal.pidfd_send_signal(fd, signum)
                return True
        return False


def all_pids() -> list[int]:
    """Ids of all visible processes."""
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def is_ours(pid: int) -> bool:
    """Whether a process runs as our user."""
    with contextlib.suppress(*_HIDDEN):
        return (_PROC / str(pid)).stat().st_uid == os.geteuid()
    return False


def command_of(pid: int) -> list[str]:
    """A process's command line; empty if it is gone, a zombie, or not readable."""
    return _words(pid, "cmdline")


def environment_of(pid: int) -> dict[str, str]:
    """A process's initial environment; empty if it is gone or another user's."""
    return dict(entry.split("=", 1) for entry in _words(pid, "environ") if "=" in entry)


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
    """Fields after the command (proc_pid_stat(5)), the state first; None if gone or hidden."""
    with contextlib.suppress(*_HIDDEN):
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return None


def _words(pid: int, name: str) -> list[str]:
    """The words of a file in which NUL bytes end them; none if the process is gone or hidden."""
    with contextlib.suppress(*_HIDDEN):
        data = (_PROC / str(pid) / name).read_bytes()
        return [word.decode(errors="surrogateescape") for word in data.split(b"\0") if word]
    return []
