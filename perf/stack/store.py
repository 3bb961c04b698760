"""A Redis server for one benchmark or test, on a free loopback port."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio

from perf.load.connection import HOST
from pool.process.ports import free_ports

PASSWORD = "open sesame"
START_S = 30.0


class StoreServer:
    """One server and its folder; it can be killed, stopped and started again."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        (self.port,) = free_ports(1)
        self.url = self.url_at(self.port)
        self._process: asyncio.subprocess.Process | None = None

    def url_at(self, port: int, password: str = PASSWORD) -> str:
        """The server as it is found at another port, or with another password."""
        return f"redis://:{password.replace(' ', '%20')}@{HOST}:{port}/0"

    async def start(self) -> None:
        """Start the server, with what it had before, and wait until it answers."""
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            *("--port", str(self.port), "--bind", HOST, "--dir", str(self._folder)),
            *("--requirepass", PASSWORD, "--appendonly", "yes", "--appendfsync", "always"),
            *("--save", "", "--daemonize", "no"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(START_S):
            while True:
                try:
                    async with self.client() as client:
                        await client.ping()
                except redis.ConnectionError:
                    await asyncio.sleep(0.02)
                else:
                    return

    def client(self) -> "redis.asyncio.Redis":
        return redis.asyncio.Redis.from_url(self.url, driver_info=None)

    def signal(self, number: int) -> None:
        """Send the server a signal."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """End the server at once, stopped or not. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()


def store_program() -> str | None:
    """The server's program; None where none is installed."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@asynccontextmanager
async def store_server(program: str, folder: Path) -> AsyncIterator[StoreServer]:
    """A running server, until the block ends."""
    server = await asyncio.to_thread(StoreServer, program, folder)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()
