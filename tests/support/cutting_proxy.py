"""A network that breaks where a test wants it to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

Cuts = Callable[[bytes, int], bool]
"""Whether to drop the connection after this piece of an answer, which is not delivered any more
when the second argument, the bytes of event streams so far, is 0."""


@asynccontextmanager
async def proxy(url: str, cuts: Cuts) -> AsyncIterator[str]:
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
                if b"text/event-stream" in data or streamed:
                    streamed += len(data)
                cut = cuts(data, streamed)
                if streamed or not cut:
                    writer.write(data)
                if cut:
                    break
        finally:
            sending.cancel()
            writer.transport.abort()
            there_writer.transport.abort()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@asynccontextmanager
async def cutting_proxy(url: str, cuts: int, *, after_bytes: int = 1000) -> AsyncIterator[str]:
    """The first ``cuts`` event streams are cut after ``after_bytes`` or so."""
    left = cuts

    def cut(data: bytes, streamed: int) -> bool:
        nonlocal left
        if streamed <= after_bytes or not left:
            return False
        left -= 1
        return True

    async with proxy(url, cut) as proxied:
        yield proxied
        assert left == 0, "the proxy had nothing to cut"


@asynccontextmanager
async def losing_answers(url: str, status: bytes, times: int) -> AsyncIterator[str]:
    """The first ``times`` answers with that status never arrive; what was asked is done."""
    left = times

    def cut(data: bytes, streamed: int) -> bool:
        nonlocal left
        if not left or not data.startswith(b"HTTP/1.1 " + status):
            return False
        left -= 1
        return True

    async with proxy(url, cut) as proxied:
        yield proxied
        assert left == 0, "the proxy had nothing to lose"
