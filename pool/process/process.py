"""One command under a guardian: starts it, finds it again from another keeper, ends it.

It ends with us, or outlives us if it has a ``home``. Then its facts are stored where they cannot be
lost: in the command line of its guardian (``Label``), and in the environment that all of its
processes inherit (``MARK``). Its own folder has its process id and its exit status::

    HOME/run/<mark>/started   the command's process id
    HOME/run/<mark>/ended     its exit status
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from catalog.errors import StartFailed
from catalog.paths import ROOT
from pool.process import guardian
from pool.process.logs import keep_bounded, open_log
from pool.process.proc import (
    ProcessId,
    all_pids,
    command_of,
    environment_of,
    is_ours,
    kill_marked,
)

MARK = "TIDEGATE_POOL_MARK"
"""Variable in the environment of every process of a run; its value is the run's mark."""
_MARKED = re.compile(r"tidegate_[0-9a-f]{12}_", re.ASCII)
"""Pattern of a mark. A mark names a folder and prefixes shared memory; both are removed."""
_LABEL = "--label="
_UP_S = 30.0
"""Seconds for the start of a guardian: it takes about 20 ms, longer if memory is short."""
_POLL_S = 0.01
_MARGIN_S = 2.0
"""Seconds for a guardian to send SIGKILL and wait; after that, we do its work."""
OnStep = Callable[[str], None]
"""Callback for each step of a start: fits, prepared, spawned, started."""


def no_step(step: str) -> None:
    """An ``OnStep`` that does nothing."""


@dataclass(frozen=True, slots=True)
class Label:
    """Facts about a run. If the run outlives us, they are in its guardian's command line, which
    every local user can read."""

    home: str
    """Folder of the pool that the run belongs to; empty if it ends with us."""
    unit: str
    mark: str
    """Name of this run, and prefix of the names of its shared memory."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return Path(self.home) / "run" / self.mark


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run whose guardian is known."""

    guardian: ProcessId
    label: Label

    @property
    def ports(self) -> tuple[int, int, int]:
        """Ports for HTTP, gRPC, metrics; 0 if unknown."""
        numbers = [0, 0, 0]
        with contextlib.suppress(ValueError):
            for at, text in enumerate(self.label.facts.get("ports", "").split(",")[:3]):
                numbers[at] = int(text)
        return numbers[0], numbers[1], numbers[2]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(filter(None, self.label.facts.get("devices", "").split(",")))

    def variable(self, name: str) -> str:
        """A variable of its initial environment; empty if it is not set."""
        return environment_of(self.guardian.pid).get(name, "")


def find_detached(home: Path) -> list[FoundRun]:
    """Every running process of ``home``, even without saved state. Reads all of ``/proc``.

    Any user can give a process any command line, so only processes of our own user count.
    """
    found = []
    for pid in all_pids():
        if not is_ours(pid):
            continue
        identity = ProcessId.of(pid)
        label = _label_in(command_of(pid))
        if label is None or label.home != str(home) or identity is None:
            continue
        if identity.is_running:
            found.append(FoundRun(identity, label))
    return found


def clear_remains(home: Path, running: Sequence[FoundRun]) -> list[str]:
    """End the remains of runs whose guardian was killed; returns their names."""
    live = {one.label.mark for one in running}
    with contextlib.suppress(FileNotFoundError):
        folders = [each for each in (home / "run").iterdir() if _MARKED.fullmatch(each.name)]
        gone = [Label(str(home), "", each.name) for each in folders if each.name not in live]
        for label in gone:
            _clean(label, _number_in(label.run_dir / guardian.ENDED) is None)
        return [label.mark for label in gone]
    return []


class GuardedProcess:
    """One command under a guardian, for use by its keeper.

    ``end`` and ``kill`` return when all of its processes and shared memory are gone.
    """

    def __init__(self, name: str, found: FoundRun, pid: int, log: Path | None) -> None:
        self.name = name
        self.found = found
        self.pid = pid
        """The command's own process id, which is also its process group."""
        self._log = log
        self._ended = asyncio.create_task(self._watch(), name=f"watch {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None,
        mark: str = "",
        home: Path | None = None,
        facts: Mapping[str, str] | None = None,
        on_step: OnStep = no_step,
    ) -> "GuardedProcess":
        """Start ``command`` under a guardian. If ``log`` is None, its output goes to our stderr.
        Shared memory whose name begins with ``mark`` is removed at its end.

        With ``home`` it outlives us, and later keepers get ``facts``. Raises ``StartFailed`` if it
        cannot be executed.
        """
        mark = mark or f"tidegate_{secrets.token_hex(6)}_"
        label = Label("" if home is None else str(home), name, mark, dict(facts or {}))
        reading, writing = os.pipe()
        try:
            if home is not None:
                label.run_dir.mkdir(mode=0o700, parents=True)
            on_step("prepared")
            pid = _spawn(label, command, {**env, MARK: mark}, log, writing)
        except OSError as error:  # no processes, files or memory left; a log that has just gone
            _remove(label)
            os.close(reading)
            raise StartFailed(f"{name}: cannot start: {error}") from error
        finally:
            os.close(writing)
        try:
            on_step("spawned")
            identity = ProcessId.of(pid)
            async with asyncio.timeout(_UP_S):
                await _readable(reading)
            told = os.read(reading, 32)
        except (asyncio.CancelledError, TimeoutError) as error:
            os.kill(pid, signal.SIGKILL)  # our child exists until we wait for it
            _reap(pid)
            _clean(label, True)
            if isinstance(error, TimeoutError):
                raise StartFailed(f"{name}: its guardian did not start in {_UP_S:.0f} s") from None
            raise
        finally:
            os.close(reading)
        if not told:
            _reap(pid)
            _remove(label)
            where = f" (see {log})" if log else ""
            raise StartFailed(f"{name}: cannot run {command[0]}{where}")
        if identity is None:
            os.kill(pid, signal.SIGTERM)
            raise StartFailed(
                f"{name}: its guardian cannot be seen in /proc, which must be mounted"
            )
        return cls(name, FoundRun(identity, label), int(told), log)

    @classmethod
    async def adopt(cls, name: str, found: FoundRun, log: Path | None) -> "GuardedProcess":
        """Take over a process started before. Raises ``StartFailed`` if it has ended."""
        label = found.label
        async with asyncio.timeout(_UP_S):
            while (pid := _number_in(label.run_dir / guardian.STARTED)) is None:
                if not found.guardian.is_running:
                    status = _number_in(label.run_dir / guardian.ENDED)
                    _clean(label, status is None)
                    raise StartFailed(f"{name} ended with status {status} before it had started")
                await asyncio.sleep(_POLL_S)
        return cls(name, found, pid, log)

    @property
    def running(self) -> bool:
        """False once all of its processes are gone."""
        return not self._ended.done()

    async def wait(self) -> int:
        """Wait until all of it is gone; return the exit status (128 + signal, as in a shell)."""
        return await asyncio.shield(self._ended)

    async def end(self, grace_s: float) -> int:
        """Send SIGTERM, and SIGKILL after ``grace_s``; return the exit status."""
        self.found.guardian.send(guardian.END)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Send SIGKILL to all of its processes at once; return the exit status."""
        self.order_kill()
        try:
            async with asyncio.timeout(_MARGIN_S):
                return await self.wait()
        except TimeoutError:  # the guardian is stuck (for example, stopped): do its work
            self.found.guardian.send(signal.SIGKILL)
            return await self.wait()

    def order_kill(self) -> None:
        """Order SIGKILL for all of its processes, without waiting for their end."""
        self.found.guardian.send(guardian.KILL)

    async def _watch(self) -> int:
        bounding = asyncio.create_task(keep_bounded(self._log)) if self._log else None
        label, pid = self.found.label, self.found.guardian.pid
        try:
            if (fd := self.found.guardian.open()) is not None:
                try:
                    await _readable(fd)
                finally:
                    os.close(fd)
            reaped, told = _reap(pid, os.WNOHANG), _number_in(label.run_dir / guardian.ENDED)
            status = told if reaped is None else reaped
            _clean(label, status is None)
            return 128 + signal.SIGKILL if status is None else status
        finally:
            if bounding is not None:
                bounding.cancel()


def _spawn(
    label: Label, command: Sequence[str], env: Mapping[str, str], log: Path | None, out: int
) -> int:
    """Start a guardian in its own session; it inherits only ``out`` and our stderr."""
    argv = [sys.executable, "-I", "-S", guardian.__file__, f"--shm-prefix={label.mark}"]
    if label.home:
        told = json.dumps(asdict(label), sort_keys=True)
        argv += [f"--detached={label.run_dir}", f"{_LABEL}{told}"]
    else:
        argv.append(f"--starter={os.getpid()}")
    actions: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, out, 1),
    ]
    with contextlib.ExitStack() as stack:
        if log is not None:
            file = stack.enter_context(open_log(log))
            actions.append((os.POSIX_SPAWN_DUP2, file.fileno(), 2))
        return os.posix_spawn(
            argv[0], [*argv, "--", *command], dict(env), file_actions=actions, setsid=True
        )


def _label_in(argv: Sequence[str]) -> Label | None:
    """The label in a guardian's command line; None for any other command line."""
    if len(argv) < 5 or not argv[3].endswith("guardian.py"):
        return None
    text = next((word.removeprefix(_LABEL) for word in argv if word.startswith(_LABEL)), None)
    try:
        label = None if text is None else Label(**json.loads(text))
        return label if label is not None and _MARKED.fullmatch(label.mark) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _reap(pid: int, options: int = 0) -> int | None:
    """Collect a child that has ended. Returns its status; None if it was killed, or is another
    keeper's child."""
    try:
        ended, status = os.waitpid(pid, options)
    except ChildProcessError:
        return None
    return os.WEXITSTATUS(status) if ended and os.WIFEXITED(status) else None


async def _readable(fd: int) -> None:
    """Wait until a pipe has data to read, or until the process of a descriptor has ended."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _clean(label: Label, was_killed: bool) -> None:
    """Remove the remains of a run. A guardian that was not killed has removed most of them."""
    if was_killed:
        kill_marked(MARK, label.mark)
        guardian.remove_shared_memory(label.mark)
    _remove(label)


def _remove(label: Label) -> None:
    if label.home:
        shutil.rmtree(label.run_dir, ignore_errors=True)


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def command_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Our environment with ``changes``; a value of None removes the variable.

    The path is added because started commands import ``orchestrator`` or ``worker``.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in env.items() if value is not None}
