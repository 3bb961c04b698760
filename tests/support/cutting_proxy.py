"""A network that breaks where a test wants it to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

Cut = Callable[[bytes, int], int | None]
"""How much of this piece of an answer to deliver before the connection is dropped; None: go on. The
second argument is what came of the event stream before it, in bytes; 0 in other answers."""


@asynccontextmanager
async def proxy(url: str, cut: Cut) -> AsyncIterator[str]:
    """Forwards to ``url``."""
    target = urlsplit(url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(target.hostname, target.port)

        async def requests() -> None:
            while data := await reader.read(65536):
                there_writer.write(data)

        sending = asyncio.create_task(requests())
        streamed = 0
        try:
            while data := await there_reader.read(65536):
                delivered = cut(data, streamed)
                writer.write(data[:delivered])
                if delivered is not None:
                    await writer.drain()
                    break
                if b"text/event-stream" in data or streamed:
                    streamed += len(data)
        finally:
            sending.cancel()
            writer.close()
            there_writer.transport.abort()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@asynccontextmanager
async def cutting_proxy(url: str, cuts: int, *, after_bytes: int = 1000) -> AsyncIterator[str]:
    """The first ``cuts`` event streams are cut after so many bytes, heads included."""
    left = cuts

    def cut(data: bytes, streamed: int) -> int | None:
        nonlocal left
        is_stream = streamed or b"text/event-stream" in data
        if not left or not is_stream or streamed + len(data) <= after_bytes:
            return None
        left -= 1
        return after_bytes - streamed

    async with proxy(url, cut) as proxied:
        yield proxied
        assert left == 0, "the proxy had nothing to cut"


@asynccontextmanager
async def losing_answers(url: str, status: bytes, times: int) -> AsyncIterator[str]:
    """The first ``times`` answers with that status never arrive; what was asked is done."""
    left = times

    def cut(data: bytes, streamed: int) -> int | None:
        nonlocal left
        if not left or not data.startswith(b"HTTP/1.1 " + status):
            return None
        left -= 1
        return 0

    async with proxy(url, cut) as proxied:
        yield proxied
        assert left == 0, "the proxy had nothing to lose"
