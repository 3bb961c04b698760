"""The socket by which ``tidegate pool status``, ``stop`` and ``reload`` speak to the manager.

One JSON object on a line each way. The socket lies in the pool's folder, and only its owner can
open it; that is all that it asks for.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from catalog.errors import PoolInUse, ProvisionError

Answer = dict[str, Any]
Handler = Callable[[Answer], Awaitable[Answer]]
_LINE_BYTES = 2**20


class ControlSocket:
    """The manager's end of the socket."""

    def __init__(self, home: Path, handler: Handler) -> None:
        """``handler`` gets ``{"do": …}``. A ``ProvisionError`` that it raises becomes an answer."""
        self._home = home
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        path = self._home / "control"
        path.unlink(missing_ok=True)  # left by a manager that was killed; this one has the lock
        with _short(path) as short:
            self._server = await asyncio.start_unix_server(self._serve, short, limit=_LINE_BYTES)
            os.chmod(short, 0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            (self._home / "control").unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                line = await reader.readline()
                if not line:
                    return
                answer = await self._handler(json.loads(line))
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


async def ask(home: Path, order: Answer, timeout_s: float) -> Answer:
    """Ask the manager of ``home``; returns its answer.

    Raises ``PoolInUse`` if none answers, ``ProvisionError`` with the reason if it refuses.
    """
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
            f"the manager of {home} has not answered for {timeout_s:.0f} s; its log says what it "
            "does"
        ) from None
    except (OSError, ValueError) as error:
        raise PoolInUse(f"no manager runs for {home}: tidegate pool run FILE starts one") from error
    if reason := answer.get("error"):
        raise ProvisionError(str(reason))
    return answer


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of ``path`` that fits into a socket's address, which has room for 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
