"""Clients on bare sockets, which read when a test has them read."""

import asyncio
import json
import socket

from tests.orchestrator.conftest import Service

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
AT = "/v1/chat/completions"


def posted(body: dict[str, object], path: str = AT) -> bytes:
    """A request, byte for byte."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connect(service: Service, data: bytes, receive_buffer: int = 0) -> socket.socket:
    """One that has sent ``data``."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setblocking(False)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await loop.sock_connect(client, service.runner.addresses[0][:2])
    await loop.sock_sendall(client, data)
    return client


async def send(
    service: Service, body: dict[str, object], *, path: str = AT, receive_buffer: int = 0
) -> socket.socket:
    return await connect(service, posted(body, path), receive_buffer)


async def read_to_end(client: socket.socket) -> bytearray:
    """All of a chunked response."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while not data.endswith(b"0\r\n\r\n"):
        piece = await loop.sock_recv(client, 1 << 16)
        assert piece, "the connection was closed early"
        data += piece
    return data
