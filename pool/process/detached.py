"""A guarded process that outlives its starter, and is found again by the next one.

The facts about it lie where they cannot be lost: in the command line of its guardian (``Label``)
and in the environment that all of its processes inherit (``MARK``). A folder of its own has the
FIFO that takes orders, and later its process id and exit status::

    HOME/run/<mark>/orders    from before the start
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from catalog.errors import StartFailed
from pool.process import guardian
from pool.process.logs import open_log
from pool.process.proc import (
    ProcessId,
    all_pids,
    command_of,
    environment_of,
    is_ours,
    kill_marked,
)
from pool.process.process import UnitProcess, cannot_run, guardian_command

MARK = "TIDEGATE_POOL_MARK"
"""Variable in the environment of every process of a unit; its value is the run's mark."""
_MARKED = re.compile(r"tidegate_[0-9a-f]{12}_", re.ASCII)
"""A mark: names a folder and begins names of shared memory, which are both removed."""
_LABEL = "--label="
_UP_S = 30.0
"""Seconds in which a guardian must be up: it takes some 20 ms, longer if memory is short."""
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Label:
    """Facts about a run in its guardian's command line, which every local user can read."""

    home: str
    """Folder of the pool that the run belongs to."""
    unit: str
    mark: str
    """Name of this run; begins the names of its shared memory."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return Path(self.home) / "run" / self.mark


@dataclass(frozen=True, slots=True)
class Found:
    """A detached process that runs."""

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
        """A variable of the environment that it was started with; empty if it is not set."""
        return environment_of(self.guardian.pid).get(name, "")


def find_detached(home: Path) -> list[Found]:
    """Every running process of ``home``, however it came to be forgotten. Reads all of ``/proc``.

    Anybody may give a process any command line, so only processes of our own user count.
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
            found.append(Found(identity, label))
    return found


def clear_remains(home: Path, running: Sequence[Found]) -> list[str]:
    """End the remains of runs whose guardian was killed; returns their names."""
    live = {one.label.mark for one in running}
    with contextlib.suppress(FileNotFoundError):
        folders = [each for each in (home / "run").iterdir() if _MARKED.fullmatch(each.name)]
        gone = [folder for folder in folders if folder.name not in live]
        for folder in gone:
            _clean(folder.name, folder)
        return [folder.name for folder in gone]
    return []


class DetachedProcess(UnitProcess):
    """One command under a guardian that outlives us."""

    def __init__(self, name: str, found: Found, pid: int, log: Path | None) -> None:
        self.found = found
        super().__init__(name, pid, log)

    @classmethod
    async def adopt(cls, name: str, found: Found, log: Path | None) -> "DetachedProcess":
        """Take over a process started before. Raises ``StartFailed`` if it has ended."""
        started, ended = (found.label.run_dir / n for n in (guardian.STARTED, guardian.ENDED))
        async with asyncio.timeout(_UP_S):
            while (pid := _number_in(started)) is None:
                if not found.guardian.is_running:
                    _reap(found.guardian.pid)
                    status = _number_in(ended)
                    _clean(found.label.mark, found.label.run_dir)
                    raise StartFailed(f"{name} ended with status {status} before it had started")
                await asyncio.sleep(_POLL_S)
        return cls(name, found, pid, log)

    def order(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(self.found.label.run_dir / guardian.ORDERS, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(fd, f"{grace_s}\n".encode())
            finally:
                os.close(fd)
            return
        self.found.guardian.send(signal.SIGTERM)  # its folder is gone

    def _kill_guardian(self) -> None:
        self.found.guardian.send(signal.SIGKILL)

    async def _guardian_end(self) -> int:
        await _end_of(self.found.guardian)
        _reap(self.found.guardian.pid)
        run_dir = self.found.label.run_dir
        status = _number_in(run_dir / guardian.ENDED)
        _clean(self.found.label.mark, run_dir)
        return 128 + signal.SIGKILL if status is None else status


class DetachedStarter:
    """Starts the processes of one unit (``StartProcess``). ``facts`` returns, at each start, what
    later managers must know.

    ``on_step`` is called before (``prepared``) and after the start (``spawned``).
    """

    def __init__(
        self,
        home: Path,
        unit: str,
        facts: Callable[[], dict[str, str]],
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._home = home
        self._unit = unit
        self._facts = facts
        self._on_step = on_step

    async def __call__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None,
        shm_prefix: str = "",
    ) -> DetachedProcess:
        mark = shm_prefix or f"tidegate_{secrets.token_hex(6)}_"
        label = Label(str(self._home), self._unit, mark, self._facts())
        run_dir = label.run_dir
        try:
            run_dir.mkdir(mode=0o700, parents=True)
            os.mkfifo(run_dir / guardian.ORDERS, 0o600)
            self._on_step("prepared")
            pid = _spawn(label, shm_prefix, command, {**env, MARK: mark}, log)
        except OSError as error:  # no more processes, files or memory; a log that has just gone
            shutil.rmtree(run_dir, ignore_errors=True)
            raise StartFailed(f"{name}: cannot start: {error}") from error
        self._on_step("spawned")
        identity = ProcessId.of(pid)
        if identity is None:  # a child of ours is there until it is waited for
            raise StartFailed(
                f"{name}: its guardian cannot be seen in /proc, which must be mounted"
            )
        try:
            process = await DetachedProcess.adopt(name, Found(identity, label), log)
        except StartFailed as error:
            raise cannot_run(name, command, log) from error
        except (asyncio.CancelledError, TimeoutError) as error:
            identity.send(signal.SIGKILL)
            await _end_of(identity)
            _reap(pid)
            _clean(mark, run_dir)
            if isinstance(error, TimeoutError):
                raise StartFailed(f"{name}: its guardian did not start in {_UP_S:.0f} s") from None
            raise
        return process


def _spawn(
    label: Label,
    shm_prefix: str,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path | None,
) -> int:
    """Start a guardian in a session of its own, with nothing of ours open but stderr."""
    detached = f"--detached={label.run_dir}"
    told = f"{_LABEL}{json.dumps(asdict(label), sort_keys=True)}"
    argv = [*guardian_command(shm_prefix), detached, told, "--", *command]
    actions: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    ]
    with contextlib.ExitStack() as stack:
        if log is not None:
            file = stack.enter_context(open_log(log))
            actions.append((os.POSIX_SPAWN_DUP2, file.fileno(), 2))
        return os.posix_spawn(argv[0], argv, dict(env), file_actions=actions, setsid=True)


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


async def _end_of(process: ProcessId) -> None:
    """Wait until a process that need not be our child has ended."""
    fd = process.open()
    if fd is None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _reap(pid: int) -> None:
    """Collect a child that has ended; a process of another manager has another parent."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _clean(mark: str, run_dir: Path) -> None:
    """Remove what is left of a run; a guardian that was not killed has done most of it."""
    if _number_in(run_dir / guardian.ENDED) is None:
        kill_marked(MARK, mark)
        guardian.remove_shared_memory(mark)
    shutil.rmtree(run_dir, ignore_errors=True)


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
