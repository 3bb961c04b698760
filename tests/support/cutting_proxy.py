"""A network that breaks where a test wants it to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit

Cut = Callable[[bytes, int], int | None]
"""How much of this piece of an answer to deliver before the connection is dropped; None: go on. The
second argument is what came of the event stream before it, in bytes; 0 in other answers."""


@asynccontextmanager
async def proxy(url: str, cut: Cut) -> AsyncIterator[str]:
    """Forwards to ``url``. Every connection is closed when it ends."""
    target = urlsplit(url)
    forwarding: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding.add(asyncio.create_task(forward(reader, writer)))

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_close, writer)
            there = await asyncio.open_connection(target.hostname, target.port)
            stack.push_async_callback(_close, there[1])
            stack.callback(there[1].transport.abort)
            sending = asyncio.create_task(send(reader, there[1]))
            stack.push_async_callback(_end, [sending])
            await answer(there[0], writer)

    async def send(reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            there.write(data)

    async def answer(there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streamed = 0
        with suppress(ConnectionError):  # the client's end
            while data := await there.read(65536):
                delivered = cut(data, streamed)
                writer.write(data[:delivered])
                if delivered is not None:
                    await writer.drain()
                    break
                if b"text/event-stream" in data or streamed:
                    streamed += len(data)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"http://{host}:{port}"
    finally:
        await _end(forwarding)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


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
