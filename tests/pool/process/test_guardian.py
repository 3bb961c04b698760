"""The guardian with real processes: whatever dies, nothing of the command is left (OR-14)."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.process import guardian
from tests.support.processes import Marked, eventually

STUBBORN = "trap '' TERM; echo up >&2; while :; do sleep 0.05; done"
WITH_STRAYS = "sleep 1000 & setsid sleep 1000 & wait"


@pytest.fixture
def marked() -> Iterator[Marked]:
    marked = Marked()
    yield marked
    for pid in marked.pids():
        os.kill(pid, signal.SIGKILL)


def start(marked: Marked, script: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, *options, "--", "bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=marked.env,
        start_new_session=True,
    )


def wait_up(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == b"up\n"


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", 128 + signal.SIGSEGV)]
)
def test_reports_the_commands_own_end(marked: Marked, script: str, status: int) -> None:
    with start(marked, script) as process:
        assert process.wait() == status
    assert marked.pids() == []


def test_end_of_the_launcher_ends_everything(marked: Marked) -> None:
    """A launcher killed with -9 tells nothing; the kernel does."""
    guarded = [sys.executable, "-I", "-S", guardian.__file__, "--grace=0.1", "--starter=$$", "--"]
    script = f"{' '.join(guarded)} bash -c '{WITH_STRAYS}' & wait"
    with subprocess.Popen(["bash", "-c", script], env=marked.env) as launcher:
        eventually(lambda: len(marked.pids()) == 5, lambda: f"processes: {marked.pids()}")
        launcher.kill()
    marked.wait_gone(set())


def test_a_starter_that_is_gone_gets_no_command(marked: Marked) -> None:
    with start(marked, WITH_STRAYS, "--starter=1") as process:
        assert process.wait() == 1
    assert marked.pids() == []


@pytest.mark.parametrize("how", ["order", "later order", "signal"])
def test_sigterm_then_sigkill_after_the_grace(marked: Marked, how: str) -> None:
    with start(marked, STUBBORN, "--grace=0.1") as process:
        wait_up(process)
        if how == "signal":
            process.terminate()
        elif how == "order":
            process.send_signal(guardian.KILL)
        else:
            process.send_signal(guardian.END)  # it has any time
            process.send_signal(guardian.KILL)
        assert process.wait() == 128 + signal.SIGKILL
    assert marked.pids() == []


def test_sigterm_is_enough_for_a_polite_command(marked: Marked) -> None:
    with start(marked, "trap 'exit 5' TERM; echo up >&2; while :; do sleep 0.02; done") as process:
        wait_up(process)
        process.send_signal(guardian.END)
        assert process.wait() == 5


def test_the_command_starts_with_default_signals_in_its_own_session(marked: Marked) -> None:
    script = "grep -E 'Sig(Blk|Ign)' /proc/self/status >&2; ps -o sid= -p $$ >&2; echo $$ >&2"
    with start(marked, script) as process:
        blocked, ignored, session, pid = process.stderr.read().decode().splitlines()
    # What these tests were started to ignore, as by nohup, stays ignored.
    asked = (one for one in guardian.SIGNALS if signal.getsignal(one) is not signal.SIG_IGN)
    handled = sum(1 << (signum - 1) for signum in (*asked, signal.SIGPIPE))
    assert int(blocked.split()[1], 16) & handled == 0
    assert int(ignored.split()[1], 16) & handled == 0
    assert int(session) == int(pid)


def test_removes_shared_memory_of_its_prefix_only(marked: Marked) -> None:
    ours, other = f"tidegate_{secrets.token_hex(6)}_", f"tidegate_{secrets.token_hex(6)}_"
    try:
        for prefix in (ours, other):
            Path("/dev/shm", f"{prefix}region").touch()
        with start(marked, "true", f"--shm-prefix={ours}") as process:
            process.wait()
        assert not Path("/dev/shm", f"{ours}region").exists()
        assert Path("/dev/shm", f"{other}region").exists()
    finally:
        guardian.remove_shared_memory(other)
