"""Raw sockets, to send what a client library never would."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from perf.attack.target import Target
from perf.load.connection import CONTENT_LENGTH

SILENCE_S = 0.3
"""Seconds without a byte after which no answer is expected."""
_ANSWER_S = 30.0


@asynccontextmanager
async def connection(
    target: Target,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A socket to the orchestrator, closed with the body, whatever the other side does."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def request(
    target: Target, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> bytes:
    """A well-formed request that asks for the connection to be closed behind it."""
    all_headers = {
        "Host": f"{target.host}:{target.port}",
        "Content-Type": "application/json",
        "Connection": "close",
        "Content-Length": str(len(body)),
    } | (headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in all_headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


async def exchange(
    target: Target, data: bytes, *, cut: int | None = None, silence_s: float = _ANSWER_S
) -> bytes:
    """Send ``data``, in two packets where it is ``cut``; returns all that comes back.

    Ends with the connection, with the answer's stated length, or with ``silence_s`` of silence.
    """
    answer = b""
    async with connection(target) as (reader, writer):
        with suppress(OSError, TimeoutError):
            writer.write(data[:cut])
            if cut is not None:
                await asyncio.sleep(0.01)
                writer.write(data[cut:])
            while not _is_whole(answer):
                async with asyncio.timeout(silence_s):
                    more = await reader.read(65536)
                if not more:
                    break
                answer += more
    return answer


def _is_whole(answer: bytes) -> bool:
    head, gap, body = answer.partition(b"\r\n\r\n")
    length = CONTENT_LENGTH.search(head)
    return bool(gap) and length is not None and len(body) >= int(length[1])
