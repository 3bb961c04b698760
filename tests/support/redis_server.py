"""A Redis server of a test's own, on a free port of the loopback."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

PASSWORD = "open sesame"
START_S = 30.0


class RedisServer:
    """One server and its folder; it can be killed, stopped and started again."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"redis://:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self.port}/0"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
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

    def client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(self.url, driver_info=None)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()


def redis_program() -> str:
    """The server's program; skips the test where none is installed."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server (apt-get install redis-server)")
    return program


@asynccontextmanager
async def redis_server(program: str, folder: Path) -> AsyncIterator[RedisServer]:
    """A running server, until the block ends."""
    server = RedisServer(program, folder)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()
