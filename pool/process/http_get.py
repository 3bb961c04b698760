"""Sends simple GET requests to local processes, without the cost of a client library."""

import asyncio
import re

from pool.process.ports import host_port

ASK_S = 2.0
_STATUS = re.compile(rb"\S+\s+(\d{3})\b")


async def http_status(host: str, port: int, path: str, within_s: float = ASK_S) -> int | None:
    """Status code of one GET request; None without an answer."""
    status, _ = await get(host, port, path, with_body=False, within_s=within_s)
    return status


async def get(
    host: str, port: int, path: str, *, with_body: bool = True, within_s: float = ASK_S
) -> tuple[int | None, bytes]:
    """Status and, on request, body of one GET; the status is None without an HTTP answer."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                request = (
                    f"GET {path} HTTP/1.1\r\nHost: {host_port(host, port)}\r\n"
                    "Connection: close\r\n\r\n"
                )
                writer.write(request.encode())
                status_line = await reader.readline()
                rest = await reader.read() if with_body else b""  # to the end of the connection
            finally:
                writer.close()
    except (OSError, ValueError):  # an endless line raises ValueError
        return None, b""
    status = _STATUS.match(status_line)
    return status and int(status[1]), rest.partition(b"\r\n\r\n")[2]
