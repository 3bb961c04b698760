"""Runs a private Redis or Valkey for the orchestrators of one launch.

It listens only on a Unix socket that only this user may open. Writes are on disk before it answers,
so durable tasks survive the end of all processes, and the next launch continues them.
"""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Unpack

from catalog.errors import MachineUnfit, StartFailed
from pool.process.guardian import SHARED_MEMORY
from pool.process.process import command_environment, new_mark
from pool.supervise import ProcessUnit, UnitOptions

PROGRAMS = ("redis-server", "valkey-server")
_ANSWER_S = 2.0


def find_store() -> str:
    """The program of a store on this machine. Raises ``MachineUnfit`` if there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    raise MachineUnfit(
        "several processes share a Redis or Valkey (6.2 or later), but neither redis-server nor "
        "valkey-server is installed here: apt-get install redis-server, or set TIDEGATE_STATE__URL "
        "to a running one"
    )


class StoreProcess(ProcessUnit):
    """A supervised store. It restarts with its data, on the same socket."""

    start_s = 60.0
    """Maximum seconds to load its data."""
    is_given_up = False  # it ends whenever its disk is full

    def __init__(self, program: str, folder: Path, **options: Unpack[UnitOptions]) -> None:
        """``folder`` holds the data; it is created for this user only."""
        super().__init__("store", **options)
        self._program = program
        self._folder = folder
        # A socket's path can have at most 107 bytes, which a path in the state folder may exceed.
        # Here, the guardian also removes the socket of a launcher that was killed.
        self._socket = SHARED_MEMORY / f"{new_mark()}store"

    @property
    def url(self) -> str:
        """``TIDEGATE_STATE__URL`` of its orchestrators."""
        return f"unix://{self._socket}"

    @property
    def where(self) -> str:
        """The folder of its data, for a person."""
        return f"data in {self._folder}"

    async def start(self) -> None:
        """Start it and wait until it answers. Raises ``StartFailed`` with its last log lines."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
        except OSError as error:
            raise StartFailed(
                f"{self.name}: cannot use {self._folder}: {error.strerror}"
            ) from error
        command = [
            self._program,
            *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "600"),
            *("--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "always"),
            *("--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"),
        ]
        await self._spawn(command, command_environment({}), self._socket.name)
        await self.resume()

    async def _answers(self) -> bool:
        """Whether it accepts requests; it does not while it loads its data."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        return False
