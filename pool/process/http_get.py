"""Sends simple GET requests to local processes, without the cost of a client library."""

import asyncio
import re

from pool.process.ports import host_port

ASK_S = 2.0
_STATUS = re.compile(rb"\S+\s+(\d{3})\b")


async def http_status(host: str, port: int, path: str, within_s: float = ASK_S) -> int | None:
    """Status code of one GET request; None without an answer."""
    return (await get(host, port, path, within_s))[0]


async def get(host: str, port: int, path: str, within_s: float = ASK_S) -> tuple[int | None, bytes]:
    """Status and body of one GET; the status is None without an HTTP answer."""
    head = f"GET {path} HTTP/1.1\r\nHost: {host_port(host, port)}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(head.encode())
                status_line = await reader.readline()
                rest = await reader.read()  # to the end of the connection
            finally:
                writer.close()
    except (OSError, ValueError):  # an endless line raises ValueError
        return None, b""
    status = _STATUS.match(status_line)
    return status and int(status[1]), rest.partition(b"\r\n\r\n")[2]
