"""What the port says while the journal is read, and to how many at a time (OR-14)."""

import asyncio
import gc
import socket
from itertools import islice

import pytest
from aiohttp import web

from orchestrator.api.http.accepting import ACCEPTS_PER_PASS, Port, PortSite
from orchestrator.api.starting import MAX_CONNECTIONS, saying_that_it_starts
from pool.process.http_get import get
from pool.process.ports import free_ports


async def test_a_crowd_takes_no_more_files_than_a_few() -> None:
    (port,) = await asyncio.to_thread(free_ports, 1)
    async with saying_that_it_starts("127.0.0.1", port):
        coming = [asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MAX_CONNECTIONS)]
        crowd = await asyncio.gather(*coming)
        status, body = await get("127.0.0.1", port, "/v1/models")
        assert status == 503 and b"starting" in body
        assert await get("127.0.0.1", port, "/health/live") == (200, b'{"status":"starting"}')
        ends = [asyncio.create_task(reader.read()) for reader, _ in crowd]
        for end in islice(asyncio.as_completed(ends, timeout=10.0), 2 * MAX_CONNECTIONS):
            assert await end == b""
    await asyncio.gather(*ends)
    for _, writer in crowd:
        writer.close()


ASKED = b"GET /health/ready HTTP/1.1\r\nHost: a\r\n\r\n"
PASSES = (0, 1, 2, 3, 5)
"""Passes of the loop after which the port is handed over or closed. A connection is accepted,
attached, read and answered within them."""


def hear(client: socket.socket) -> str:
    """What a client gets within two seconds: a status, ``closed``, ``reset``, or nothing."""
    with client:
        client.settimeout(2.0)
        try:
            head = client.recv(200)
        except ConnectionResetError:
            return "reset"
        except TimeoutError:
            return "nothing"
        return head.split()[1].decode() if head else "closed"


def connected(port: Port) -> socket.socket:
    """A connection that the kernel has made, and nobody has accepted yet."""
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(port.sockets[0].getsockname()[:2])
    return client


async def asked_just_now(port: Port, passes: int) -> socket.socket:
    client = connected(port)
    client.send(ASKED)
    for _ in range(passes):
        await asyncio.sleep(0)
    return client


@pytest.mark.parametrize("passes", PASSES)
async def test_or26_a_start_that_fails_answers_or_closes_each_connection(passes: int) -> None:
    """And does not wait for a client that says nothing."""
    async with asyncio.timeout(10.0):
        async with saying_that_it_starts("127.0.0.1", 0) as port:
            silent = connected(port)
            clients = [await asked_just_now(port, passes) for _ in range(ACCEPTS_PER_PASS + 4)]
        with silent:
            for client in clients:
                assert await asyncio.to_thread(hear, client) in ("503", "closed")


async def served(request: web.Request) -> web.Response:
    return web.Response(text="served")


@pytest.mark.parametrize("passes", PASSES)
async def test_or26_no_connection_is_lost_between_two_servers(passes: int) -> None:
    """A client that asks while the service takes the port over is answered by one of the two,
    though what is alive is frozen for the collector meanwhile."""
    app = web.Application()
    app.router.add_get("/health/ready", served)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    async with asyncio.timeout(10.0), saying_that_it_starts("127.0.0.1", 0) as port:
        client = await asked_just_now(port, passes)
        await PortSite(runner, port).start()
        gc.freeze()
        assert await asyncio.to_thread(hear, client) in ("503", "200", "closed")
        last = await asked_just_now(port, passes)
        await runner.cleanup()
        assert await asyncio.to_thread(hear, last) in ("200", "closed")
    gc.unfreeze()
