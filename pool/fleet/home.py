"""The pool's folder: the lock of its one manager, and the state for the next manager.

    HOME/lock          held by the manager
    HOME/state.json    ports, process ids and the lane token; for its owner only
    HOME/control       the manager's socket, which only its owner can open; ``tidegate pool`` and
                       the manager exchange JSON objects on it, one per line
    HOME/run/          one folder for each run (``process.process``)
    HOME/logs/         one log for each instance

The state is not authoritative: the manager finds running processes in ``/proc``. If the state is
lost, only chosen ports and counts are lost.
"""

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from catalog.atomic import write_atomically
from catalog.errors import PoolInUse, ProvisionError, StateFileUnusable
from catalog.paths import state_dir
from pool.pool_file import PoolFile

Answer = dict[str, Any]
Handler = Callable[[Answer], Awaitable[Answer]]
_LINE_BYTES = 2**20


def home_of(file: PoolFile) -> Path:
    """The folder of this pool's state."""
    return (file.pool.home or state_dir() / "pool").expanduser().resolve()


class InstanceRecord(msgspec.Struct, forbid_unknown_fields=False):
    """Saved facts about one instance. ``mark`` names its run; process ids are for people."""

    digest: str = ""
    ports: tuple[int, int, int] = (0, 0, 0)
    mark: str = ""
    state: str = ""
    pid: int | None = None
    address: str = ""
    restarts: int = 0


class PoolState(msgspec.Struct, forbid_unknown_fields=False):
    """The saved state for the next manager."""

    version: int = 1
    manager_pid: int = 0
    lane_token: str = ""
    instances: dict[str, InstanceRecord] = {}


class PoolHome:
    """Paths, the lock and the state file."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.state_path = self.path / "state.json"
        self.logs = self.path / "logs"
        self._lock: int | None = None

    def claim(self) -> None:
        """Lock this pool for its manager, until ``release`` or the end of the process. Raises
        ``PoolInUse``, ``StateFileUnusable``."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            status, ours = self.path.stat(), os.geteuid()
            is_own = not status.st_mode & 0o002 and (not ours or status.st_uid in (0, ours))
            if is_own:
                (self.path / "run").mkdir(exist_ok=True, mode=0o700)
                lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StateFileUnusable(
                f"cannot write {self.path}: {error.strerror}; choose another folder with home in "
                "[pool], or with TIDEGATE_HOME"
            ) from error
        if not is_own:
            raise StateFileUnusable(
                f"other users may write to {self.path}, and could control the pool; set home in "
                "[pool] to a folder of this user alone"
            )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise PoolInUse(
                f"another manager (process {holder}) keeps the pool in {self.path}; query it with "
                "tidegate pool status, or set another home in [pool]"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def release(self) -> None:
        """Unlock the pool for another manager. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def read(self, warn: Callable[[str], None]) -> PoolState:
        """The last manager's state. If it is damaged, an empty state, and a warning."""
        try:
            return msgspec.json.decode(self.state_path.read_bytes(), type=PoolState)
        except FileNotFoundError:
            return PoolState()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            where = f"the state in {self.state_path} cannot be read ({error})"
            warn(f"{where}; running instances are found without it")
            return PoolState()

    def write(self, state: PoolState) -> None:
        """Replace the state; after a crash, it is the old or the new one. Raises ``OSError``."""
        state.manager_pid = os.getpid()
        write_atomically(self.state_path, msgspec.json.format(msgspec.json.encode(state), indent=1))


@contextlib.asynccontextmanager
async def control_socket(home: Path, handler: Handler) -> AsyncIterator[None]:
    """The manager's end of the socket. ``handler`` gets ``{"do": …}``. If it raises
    ``ProvisionError``, that is the answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                answer = await handler(json.loads(await reader.readline()))
            except ProvisionError as error:
                answer = {"error": str(error)}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                answer = {"error": f"no such order: {error}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass  # the client is gone
        finally:
            writer.close()

    path = home / "control"
    path.unlink(missing_ok=True)  # left by a manager that was killed; this one has the lock
    with _short(path) as short:
        server = await asyncio.start_unix_server(serve, short, limit=_LINE_BYTES)
        os.chmod(short, 0o600)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


async def ask(home: Path, order: Answer, timeout_s: float) -> Answer:
    """Send an order to the manager of ``home``; return its answer. Raises ``PoolInUse`` without an
    answer, ``ProvisionError`` with the reason if it refuses."""
    path = home / "control"
    try:
        async with asyncio.timeout(timeout_s):
            with _short(path) as short:
                reader, writer = await asyncio.open_unix_connection(short, limit=_LINE_BYTES)
            try:
                writer.write(json.dumps(order).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        answer: Answer = json.loads(line)
    except TimeoutError:
        raise PoolInUse(
            f"the manager of {home} has not answered for {timeout_s:.0f} s; its log shows what it "
            "is doing"
        ) from None
    except (OSError, ValueError) as error:
        raise PoolInUse(f"no manager runs for {home}: tidegate pool run FILE starts one") from error
    if reason := answer.get("error"):
        raise ProvisionError(str(reason))
    return answer


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of ``path`` that fits into a socket's address, at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
