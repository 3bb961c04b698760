"""What ``/proc`` tells of processes that are nobody's children here, and signals that cannot hit
another one.

A process id is given away again once its process is gone; with the time at which it started it
names one process for as long as the machine is up.
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
    """One process, now and after its end. ``started_ticks``: since the machine's start."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """Of the process that has this id now; None where none has."""
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    @property
    def is_running(self) -> bool:
        """Whether it exists and has not ended (a zombie has)."""
        fields = _stat(self.pid)
        return (
            fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.started_ticks
        )

    def open(self) -> int | None:
        """A file descriptor of the process, which polls as readable at its end; the caller closes
        it. None where the process is gone. Raises ``OSError`` where the kernel has none."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_running:  # asked after it was opened: from here on it can be no other
            return fd
        os.close(fd)
        return None

    def send(self, signum: signal.Signals) -> bool:
        """Send it a signal, and nobody else; whether it was there to get it."""
        try:
            fd = self.open()
        except OSError:  # a kernel without such descriptors
            if not self.is_running:
                return False
            os.kill(self.pid, signum)
            return True
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
    """Of every process that can be seen."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def is_ours(pid: int) -> bool:
    """Whether it runs as the same user as we do."""
    try:
        return (_PROC / str(pid)).stat().st_uid == os.geteuid()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def command_of(pid: int) -> list[str]:
    """Its command line; empty where it is gone, a zombie, or not ours to read."""
    return [word.decode(errors="surrogateescape") for word in _read(pid, "cmdline")]


def environment_of(pid: int) -> dict[str, str]:
    """What it was started with; empty where it is gone or somebody else's."""
    entries = (word.decode(errors="surrogateescape") for word in _read(pid, "environ"))
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def kill_marked(variable: str, value: str) -> list[int]:
    """SIGKILL to every process that has ``variable=value`` in its environment; their ids."""
    killed = []
    for pid in all_pids():
        identity = ProcessId.of(pid)
        if identity is None or environment_of(pid).get(variable) != value:
            continue
        with contextlib.suppress(PermissionError):
            if identity.send(signal.SIGKILL):
                killed.append(pid)
    return killed


def _stat(pid: int) -> list[str] | None:
    """Its fields after the command (proc_pid_stat(5)): the state first."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: hidepid=1
        return None


def _read(pid: int, name: str) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        data = (_PROC / str(pid) / name).read_bytes()
        return [word for word in data.split(b"\0") if word]
    return []
