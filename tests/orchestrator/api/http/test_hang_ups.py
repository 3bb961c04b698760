"""WP-1: a client that hangs up is noticed whatever it has sent."""

import asyncio
import json
import logging
import socket
import struct

import pytest

from orchestrator.api.http import connection
from protocol import AbortCause
from tests.orchestrator.api.http.raw import CHAT, connect, posted
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def connect_in_time(service: Service, data: bytes, within_s: float) -> socket.socket:
    """One that had sent all of it within half of the time that a head may take; on a slow machine
    the service rightly closes others before they have said anything."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        client = await connect(service, data)
        if loop.time() - began < within_s / 2:
            return client
        client.close()


async def read_all(client: socket.socket) -> bytes:
    """To the end of the connection, which is the server's to close."""
    loop, data = asyncio.get_running_loop(), b""
    while piece := await loop.sock_recv(client, 1 << 16):
        data += piece
    client.close()
    return data


BEHIND = {
    "a request": GET,
    "many requests": GET * 100,
    "a body that nobody reads": (
        b"POST /v2/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
        + b" " * 1_000_000
    ),
    "an upgrade": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\n\r\n" + b"x" * 1_000_000,
}


@for_each(("stream", "stall_at"), [(True, 0), (True, 3), (False, 3)])
async def test_wp1_what_comes_behind_a_request_hides_no_hang_up(
    service: Service, worker: FakeWorker, stream: bool, stall_at: int
) -> None:
    """Bytes that are not read yet stand before the end of input, which is then not seen."""
    worker.plan = lambda submit: Plan(stall_at=stall_at)
    worker.cancels.clear()
    for number, behind in enumerate(BEHIND.values(), 1):
        client = await connect(service, posted(CHAT | {"stream": stream}))
        await worker.until(lambda: worker.running == 1)
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, behind))
        await asyncio.wait([sending], timeout=0.03)  # as much of it as is taken
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)  # too much of it ends the connection
        client.close()
        await worker.until(lambda: not worker.running)
        assert [cancel.cause for cancel in worker.cancels] == number * [AbortCause.DISCONNECT]


async def test_wp1_who_ends_its_side_has_hung_up(service: Service, worker: FakeWorker) -> None:
    """As TCP shows a hang-up through most proxies. What needs no wait is answered all the same."""
    worker.plan = lambda submit: Plan(stall_at=3)
    client = await connect(service, GET * 50 + posted(CHAT | {"stream": True}))
    await worker.until(lambda: worker.running == 1)
    client.shutdown(socket.SHUT_WR)
    await worker.until(lambda: not worker.running)
    assert [cancel.cause for cancel in worker.cancels] == [AbortCause.DISCONNECT]
    assert (await read_all(client)).count(b"HTTP/1.1 200 OK") == 51
    client = await connect(service, GET)
    client.shutdown(socket.SHUT_WR)
    assert (await read_all(client)).startswith(b"HTTP/1.1 200 OK")


async def test_a_request_that_is_cut_off_gets_no_answer(service: Service) -> None:
    for cut in (GET[:-3], posted(CHAT)[:-3]):
        client = await connect(service, cut)
        client.shutdown(socket.SHUT_WR)
        assert await read_all(client) == b""
    assert service.outcomes() == []


async def test_wp1_a_hang_up_after_an_expected_continue_is_noticed(
    service: Service, worker: FakeWorker
) -> None:
    """As curl sends a large body. The interim answer is not the beginning of the answer."""
    worker.plan = lambda submit: Plan(stall_at=0)
    request = posted(CHAT).replace(b"Host:", b"Expect: 100-continue\r\nHost:", 1)
    client = await connect(service, request)
    await worker.until(lambda: worker.running == 1)
    client.close()
    await worker.until(lambda: not worker.running)


async def test_a_client_gone_before_its_expected_continue_is_no_error(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    head = posted(CHAT).partition(b"\r\n\r\n")[0] + b"\r\nExpect: 100-continue\r\n\r\n"
    for _ in range(5):
        client = await connect(service, head)
        linger = struct.pack("ii", 1, 0)  # reset instead of an orderly end
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.close()
    server = service.runner.server
    assert server is not None
    await service.ask("GET", "/health/live")
    await service.until(lambda: len(server.connections) <= 1)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_wrong_chunk_in_a_later_packet_is_refused_at_once(service: Service) -> None:
    """Not when the body has been waited for, as if there were more to come."""
    head = (
        b"POST /v2/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for good in (b"", b"2\r\n{}\r\n"):
        client = await connect(service, head)
        await service.until(
            lambda: any(c.is_serving for c in service.runner.server.connections)  # type: ignore
        )
        if good:
            await asyncio.get_running_loop().sock_sendall(client, good)
            await asyncio.sleep(0.02)
        await asyncio.get_running_loop().sock_sendall(client, b"zz\r\n{}\r\n" + GET)
        async with asyncio.timeout(60):
            data = await read_all(client)
        assert data.startswith(b"HTTP/1.1 400") and data.count(b"HTTP/1.1") == 1
        assert b"Connection: close" in data
        error = json.loads(data.partition(b"\r\n\r\n")[2])["error"]
        assert "framing" in error["message"]


HALF = b"GET /health/live HTTP/1.1\r\nHost: loc"


async def test_half_a_head_behind_a_request_has_a_heads_time(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.1)
    service = await make_service(worker, http__idle_timeout_s=60.0)
    for first in (GET + b"\r\n", GET + posted(CHAT)):
        client = await connect_in_time(service, first + HALF, 0.1)
        async with asyncio.timeout(60):
            assert (await read_all(client)).startswith(b"HTTP/1.1 200")


async def test_a_running_request_outlives_half_a_head_behind_it(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.05)
    service = await make_service(worker, http__idle_timeout_s=60.0)
    plan = worker.does(Plan(stall_at=0))
    client = await connect_in_time(service, posted(CHAT) + HALF, 0.05)
    await worker.until(lambda: worker.running == 1)
    await asyncio.sleep(0.2)
    plan.release.set()
    async with asyncio.timeout(60):
        assert (await read_all(client)).startswith(b"HTTP/1.1 200")
