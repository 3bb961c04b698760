"""What is asked of a port on this machine, whatever listens there."""

import asyncio

from pool.process.http_get import get
from tests.support.cases import for_each


@for_each(
    ("said", "status", "body"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nX: y\r\n\r\nbody", 503, b"body"),
        (b"HTTP/1.1 200\r\n\r\n", 200, b""),
        (b"", None, b""),
        (b"220 mail.example ESMTP\r\n", None, b""),
        (b"HTTP/1.1 " + 5000 * b"2" + b"\r\n\r\n", None, b""),
        (100_000 * b"x", None, b""),
    ],
)
async def test_whatever_answers_is_a_status_or_none(
    said: bytes, status: int | None, body: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    assert await get(host, port, "/health/ready") == (status, body)
    listening.close()
    await listening.wait_closed()
