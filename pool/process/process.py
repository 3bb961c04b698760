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
from pool.process.logs import ignore, keep_bounded, open_log
from pool.process.proc import ProcessId, all_pids, command_of, is_ours, kill_marked

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


def new_mark() -> str:
    return f"tidegate_{secrets.token_hex(6)}_"


@dataclass(frozen=True, slots=True)
class Label:
    """Facts about a run. If the run outlives us, they are in its guardian's command line, which
    every local user can read."""

    unit: str
    mark: str
    """Name of this run, and prefix of the names of its shared memory, which is removed at its end
    (``new_mark``)."""
    home: str = ""
    """Folder of the pool that the run belongs to, and outlives us for; empty if it ends with us."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return Path(self.home) / "run" / self.mark

    @property
    def status(self) -> int | None:
        """The exit status of a run that outlives us; None before its end, or if it was killed."""
        return _number_in(self.run_dir / guardian.ENDED)

    def remove(self) -> None:
        """Remove the run's folder, if it has one."""
        if self.home:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def clean(self, *, was_killed: bool) -> None:
        """Remove the remains. A guardian that was not killed has removed most of them."""
        if was_killed:
            kill_marked(MARK, self.mark)
            guardian.remove_shared_memory(self.mark)
        self.remove()


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run whose guardian is known."""

    guardian: ProcessId
    label: Label

    @property
    def ports(self) -> tuple[int, int, int]:
        """Ports for HTTP, gRPC, metrics; 0 if unknown."""
        told = self.label.facts.get("ports", "").split(",")
        http, grpc, metrics = [*(int(port) if port.isdigit() else 0 for port in told), 0, 0][:3]
        return http, grpc, metrics


def find_detached(home: Path) -> list[FoundRun]:
    """Every running process of ``home``, even without saved state. Reads all of ``/proc``. Any user
    can give a process any command line, so only processes of our own user count."""
    found = []
    for pid in all_pids():
        identity = ProcessId.of(pid) if is_ours(pid) else None
        label = _label_in(command_of(pid))
        if identity and identity.is_running and label and label.home == str(home):
            found.append(FoundRun(identity, label))
    return found


def clear_remains(home: Path, running: Sequence[FoundRun]) -> None:
    """End the remains of runs whose guardian was killed."""
    live = {one.label.mark for one in running}
    for folder in (home / "run").glob("*"):
        if _MARKED.fullmatch(folder.name) and folder.name not in live:
            label = Label("", folder.name, str(home))
            label.clean(was_killed=label.status is None)


class GuardedProcess:
    """One command under a guardian, for use by its keeper. ``end`` and ``kill`` return when all of
    its processes and shared memory are gone."""

    def __init__(self, found: FoundRun, pid: int, log: Path | None) -> None:
        self.found = found
        self.pid = pid
        """The command's own process id, which is also its process group."""
        self._log = log
        self._ended = asyncio.create_task(self._watch(), name=f"watch {found.label.unit}")

    @classmethod
    async def start(
        cls,
        label: Label,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        on_step: OnStep = ignore,
    ) -> "GuardedProcess":
        """Start ``command`` under a guardian. If ``log`` is None, its output goes to our stderr.
        Raises ``StartFailed`` if it cannot be executed."""
        name = label.unit
        reading, writing = os.pipe()
        try:
            if label.home:
                label.run_dir.mkdir(mode=0o700, parents=True)
            on_step("prepared")
            pid = _spawn(label, command, {**env, MARK: label.mark}, log, writing)
        except OSError as error:  # no processes, files or memory left; a log that has just gone
            label.remove()
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
            label.clean(was_killed=True)
            if isinstance(error, TimeoutError):
                raise StartFailed(f"{name}: its guardian did not start in {_UP_S:.0f} s") from None
            raise
        finally:
            os.close(reading)
        if not told:
            _reap(pid)
            label.remove()
            where = f" (see {log})" if log else ""
            raise StartFailed(f"{name}: cannot run {command[0]}{where}")
        if identity is None:
            os.kill(pid, signal.SIGTERM)
            raise StartFailed(
                f"{name}: its guardian cannot be seen in /proc, which must be mounted"
            )
        return cls(FoundRun(identity, label), int(told), log)

    @classmethod
    async def adopt(cls, found: FoundRun, log: Path | None) -> "GuardedProcess":
        """Take over a process started before. Raises ``StartFailed`` if it has ended."""
        label = found.label
        async with asyncio.timeout(_UP_S):
            while (pid := _number_in(label.run_dir / guardian.STARTED)) is None:
                if not found.guardian.is_running:
                    status = label.status
                    label.clean(was_killed=status is None)
                    raise StartFailed(
                        f"{label.unit} ended with status {status} before it had started"
                    )
                await asyncio.sleep(_POLL_S)
        return cls(found, pid, log)

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
        label, process = self.found.label, self.found.guardian
        try:
            with process.open() as fd:
                if fd is not None:
                    await _readable(fd)
            reaped = _reap(process.pid, os.WNOHANG)
            status = label.status if reaped is None else reaped
            label.clean(was_killed=status is None)
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
    texts = [word.removeprefix(_LABEL) for word in argv if word.startswith(_LABEL)]
    if len(argv) < 5 or not argv[3].endswith("guardian.py") or not texts:
        return None
    try:
        label = Label(**json.loads(texts[0]))
        return label if _MARKED.fullmatch(label.mark) else None
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


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def command_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Our environment with ``changes``; a value of None removes the variable. The path is added
    because started commands import ``orchestrator`` or ``worker``."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in env.items() if value is not None}


async def succeeds(
    name: str, command: Sequence[str], env: Mapping[str, str], log: Path | None
) -> bool:
    """Run a command under a guardian to its end. It is ended when this is cancelled."""
    process = await GuardedProcess.start(Label(name, new_mark()), command, env, log)
    try:
        return await process.wait() == 0
    finally:
        await process.kill()


async def run(*command: str) -> tuple[int, str]:
    """Run a command to its end; it is killed when this is cancelled. Returns its exit status and
    what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=command_environment({}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
        return await process.wait(), said.decode(errors="replace").strip()
    except BaseException:
        process.kill()
        await process.wait()
        raise
