"""A minimal HTTP/1.1 client, so that its own cost does not affect measurements.

It has the byte patterns that all load generators look for, and one keep-alive connection.
"""

import asyncio
import re
from typing import Final, Self

import msgspec

HOST: Final = "127.0.0.1"
"""Host of all measured servers: this machine."""
EVENT: Final = b"\ndata: "
LAST_BYTES: Final = b"\r\n0\r\n\r\n"
"""Bytes at the end of a chunked body, and so of a response."""
TAIL: Final = 1024
"""Number of bytes that holds the usage event, ``[DONE]`` and the end of the body."""
USAGE: Final = re.compile(rb'"completion_tokens": ?(\d+)')
FIRST_TEXT = re.compile(rb'"text": ?"[^"]')
"""Pattern of the first event of a completion that carries text."""
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
"""Pattern of the length in a response's headers."""


def request_bytes(
    host: str, port: int, method: str, path: str, body: object = None, headers: str = ""
) -> bytes:
    """A whole request; ``headers`` are more lines, each with its end."""
    data = b"" if body is None else msgspec.json.encode(body)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class HttpError(RuntimeError):
    """The server answered with an error or hung up."""


class HttpConnection:
    """One keep-alive connection for consecutive requests, without time limits."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._received = b""

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()

    def send(
        self, method: str, path: str, body: dict[str, object] | None = None, headers: str = ""
    ) -> None:
        """Start a request, and drop unread bytes of the last response."""
        self._received = b""
        self._writer.write(request_bytes(self._host, self._port, method, path, body, headers))

    async def until(self, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        """Read a streamed response until it matches. Raises ``HttpError``."""
        while (found := pattern.search(self._received)) is None:
            await self._more()
        return found

    async def finish(self) -> bytes:
        """Read a streamed response to its end, and return all of it."""
        while not self._received.endswith(LAST_BYTES):
            await self._more()
        return self._received

    async def answer(self) -> tuple[int, bytes]:
        """Read status and body of a response that states its length."""
        while b"\r\n\r\n" not in self._received:
            await self._more()
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = CONTENT_LENGTH.search(head)
        if length is None:
            raise HttpError(f"a response without Content-Length: {head[:300]!r}")
        while len(body) < int(length[1]):
            await self._more()
            body = self._received.partition(b"\r\n\r\n")[2]
        return int(head[9:12]), body

    def drop(self) -> None:
        """Close the socket at once, even if more data would arrive."""
        self._writer.transport.abort()

    async def _more(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            raise HttpError(f"the server hung up after {self._received[-300:]!r}")
        self._received += data
        if len(self._received) >= 12 and self._received[9:10] not in b"2":
            raise HttpError(f"the server answered {self._received[:600]!r}")
