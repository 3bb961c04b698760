"""Runs one command in its own session, and guarantees that none of its processes outlive it.

    keeper ──(signals)──▶ guardian ──▶ command ──▶ its children (Triton's Python stubs)

Signals tell the guardian to end the command. On ``END`` it sends SIGTERM to the command, on
``KILL`` SIGKILL to its process group. On any other of ``SIGNALS`` it sends SIGTERM, and SIGKILL
after ``--grace``. Then it waits for every descendant, and removes shared memory with the given
prefix. It cleans up in the same way if the command ends by itself, so its exit means that
everything is gone. Its exit status is the command's, or 128 + signal, as in a shell.

It runs in its own session, so that Ctrl-C in a terminal never reaches it or the command. It
collects orphans (PR_SET_CHILD_SUBREAPER), so it also waits for a stub whose server crashed. If the
guardian itself is killed, the command dies with it (PR_SET_PDEATHSIG).

Its first line on stdout is the command's process id, which is also its group's. Standard library
only, run as ``python -I -S guardian.py``: it starts in about 20 ms.

With ``--starter PID``, the kernel sends it SIGTERM when that process, its parent, dies. With
``--detached DIR`` it outlives its starter, and the next keeper finds it by its command line
(``process``). It then also writes the process id to ``DIR/started``, the status to ``DIR/ended``.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

END, KILL = signal.SIGINT, signal.SIGUSR1
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, END, KILL)

STARTED, ENDED = "started", "ended"
"""Names in the folder of a detached run."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
_REAP_S = 2.0


def remove_shared_memory(prefix: str) -> None:
    """Remove every region whose name starts with ``prefix``."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def kill_group(pgid: int) -> None:
    """Send SIGKILL to every process of a group; an empty group is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def die_with_parent(signum: int) -> None:
    """Make the kernel send ``signum`` to this process when its parent ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _start(command: list[str], guardian: int) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the line above ran
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        start_new_session=True,
        preexec_fn=in_child,  # safe: this process has one thread
    )


def _run(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait for the end of the command, or an order to kill it. A later order only shortens this."""
    deadline: float | None = None
    is_ending = False
    while child.poll() is None:
        if deadline is None:
            signum = signal.sigwait(SIGNALS)
        else:
            got = signal.sigtimedwait(SIGNALS, max(0.0, deadline - time.monotonic()))
            signum = KILL if got is None else got.si_signo
        if signum == KILL:
            return
        if signum == signal.SIGCHLD:
            continue
        if not is_ending:
            child.terminate()
            is_ending = True
        if signum != END and deadline is None:
            deadline = time.monotonic() + grace_s


def _children() -> list[int]:
    """Process ids of direct children, including orphans that this process collected."""
    with contextlib.suppress(FileNotFoundError):  # the kernel lacks it: use the process group
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    return []


def _reap_all(child: subprocess.Popen[bytes]) -> int:
    """Kill the group and all other descendants, wait for them, return the command's status."""
    kill_group(child.pid)
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                return child.returncode
            for pid in _children():
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return -signal.SIGKILL  # stuck in the kernel; nothing more can be done


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command, and leave no process behind.")
    parser.add_argument("--shm-prefix", default="", help="shared memory to remove at the end")
    parser.add_argument("--grace", type=float, default=2.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--starter", type=int, metavar="PID", help="end with its parent")
    parser.add_argument("--detached", type=Path, metavar="DIR", help="outlive its starter")
    parser.add_argument("--label", default="", help="identifies the process later; not read here")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    run_dir: Path | None = args.detached

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # sigwait takes them
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if args.starter is not None:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != args.starter:  # it died before the line above ran
            return 1
    try:
        child = _start(args.command, os.getpid())
    except OSError as error:
        print(f"cannot run {args.command[0]}: {error.strerror}", file=sys.stderr)
        return _tell(run_dir, ENDED, 127)
    _tell(run_dir, STARTED, child.pid)
    with contextlib.suppress(BrokenPipeError):  # the starter is gone
        print(child.pid, flush=True)
    _run(child, args.grace)
    status = _reap_all(child)
    if args.shm_prefix:
        remove_shared_memory(args.shm_prefix)
    return _tell(run_dir, ENDED, status if status >= 0 else 128 - status)


def _tell(run_dir: Path | None, name: str, number: int) -> int:
    """Write a number atomically for processes that are not our parent, and return it. Ignores a
    full disk, or a folder that was removed."""
    if run_dir is not None:
        with contextlib.suppress(OSError):
            partial = run_dir / f"{name}.partial"
            partial.write_text(f"{number}\n")
            partial.replace(run_dir / name)
    return number


if __name__ == "__main__":
    sys.exit(main())
