"""Connections are accepted a few at a time, and many may wait for it."""

import asyncio
import socket
import struct
from pathlib import Path

from orchestrator.api.http.accepting import ACCEPTS_PER_PASS, LISTEN_BACKLOG, widen_backlog

_MOST_WAITING = struct.Struct("@28xI")
"""``tcpi_sacked`` in ``struct tcp_info``: of a listening socket, how many may wait."""


async def test_more_may_wait_than_are_accepted_at_a_time() -> None:
    def bound() -> int:
        info = server.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        return int(_MOST_WAITING.unpack(info)[0])

    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, backlog=ACCEPTS_PER_PASS
    )
    async with server:
        assert bound() == ACCEPTS_PER_PASS
        widen_backlog(server)
        system = await asyncio.to_thread(Path("/proc/sys/net/core/somaxconn").read_text)
        assert bound() == min(LISTEN_BACKLOG, int(system))
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
