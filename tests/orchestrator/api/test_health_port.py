"""LB-4, OR-13: health checks on a port of their own, true to what the orchestrator says."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from orchestrator.__main__ import MAIN_PORT_ONLY, _health_port
from orchestrator.api.health_port import responder
from orchestrator.api.health_port.publisher import HealthPort
from orchestrator.api.health_port.responder import HEAD_BYTES, Answers, HealthResponder
from orchestrator.settings.sections import HealthSettings
from tests.orchestrator.api.conftest import log_until, start_process
from tests.orchestrator.conftest import Service, settings_of
from tests.support.fake_worker import FakeWorker

LINE = json.dumps({"/health/live": [200, '{"a":1}'], "/health/ready": [503, "{}"]}).encode() + b"\n"

# ── what is answered ─────────────────────────────────────────────────────────────────────────────


def test_answers_are_those_of_the_last_whole_line() -> None:
    answers = Answers(now=0.0)
    assert answers.of("/health/live", 0.0) == (503, b'{"status":"starting"}')
    newer = LINE.replace(b"[200", b"[299")
    answers.take(LINE[:10], 1.0)
    assert answers.of("/health/live", 1.0)[0] == 503
    answers.take(LINE[10:] + newer + LINE[:20], 1.0)
    assert answers.of("/health/live", 1.0) == (299, b'{"a":1}')
    assert answers.of("/health/ready", 1.0) == (503, b"{}")
    assert answers.of("/metrics", 1.0)[0] == 404


def test_a_loop_that_is_silent_is_stalled_until_it_speaks() -> None:
    """A liveness check that another process answers must not hide a loop that hangs."""
    answers = Answers(now=0.0)
    answers.take(LINE, 1.0)
    assert answers.of("/health/live", 6.0)[0] == 200
    for path in ("/health/live", "/health/ready"):
        status, body = answers.of(path, 6.5)
        assert status == 503
        assert json.loads(body) == {"status": "stalled", "silent_s": 5.5}
    answers.take(b"\n", 7.0)
    assert answers.of("/health/live", 11.0) == (200, b'{"a":1}')


Checks = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def checks() -> AsyncIterator[Checks]:
    """A connection to a responder that has answers."""
    answers, (pipe, of_orchestrator) = Answers(0.0), os.pipe()
    answers.take(LINE, time.monotonic())
    with ExitStack() as stack:
        stack.callback(os.close, pipe)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        running = asyncio.create_task(HealthResponder(listener, pipe, answers).run())
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        yield reader, writer
        os.close(of_orchestrator)
        await running
        writer.close()


async def test_one_response_per_request_in_order(checks: Checks) -> None:
    """However the bytes are cut, and with several requests in one read."""
    reader, writer = checks
    writer.write(b"\r\n\r\nGET /health/li")
    await asyncio.sleep(0.05)
    writer.write(b"ve?x=1 HTTP/1.1\r\nHost: a\r\n\r\nHEAD /health/ready HTTP/1.1\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"Content-Length: 7" in head
    assert await reader.readexactly(7) == b'{"a":1}'
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"Content-Length: 2" in head
    writer.write(b"GET /health/live HTTP/1.1\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health/live HTTP/1.1\r\nConnection: close\r\n\r\n", 200),
        (b"GET /health/live HTTP/1.0\r\n\r\n", 200),
        (b"GET /health/live HTTP/1.1\r\nContent-Length: 3\r\n\r\n", 200),
        (b"POST /health/live HTTP/1.1\r\nContent-Length: 3\r\n\r\n", 405),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"x" * (HEAD_BYTES + 4), 431),
    ],
)
async def test_what_ends_a_connection(checks: Checks, request_bytes: bytes, status: int) -> None:
    reader, writer = checks
    writer.write(request_bytes)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"Connection: close" in head


def test_checks_that_come_as_the_orchestrator_ends_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that wait in the kernel, and some whose bytes come a little later."""
    monkeypatch.setattr(responder, "_READ_S", 10.0)
    answers, (pipe, of_orchestrator) = Answers(0.0), os.pipe()
    answers.take(LINE, time.monotonic())
    os.close(of_orchestrator)
    with ExitStack() as stack:
        stack.callback(os.close, pipe)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        where = listener.getsockname()
        clients = [stack.enter_context(socket.create_connection(where, 2.0)) for _ in range(100)]

        def send(client: socket.socket) -> None:
            client.send(b"GET /health/live HTTP/1.1\r\nConnection: close\r\n\r\n")

        for client in clients[:-3]:
            send(client)
        for number, client in enumerate(clients[-3:], 1):
            threading.Timer(number / 20, send, [client]).start()
        asyncio.run(HealthResponder(listener, pipe, answers).run())
        for client in clients:
            assert client.recv(100).startswith(b"HTTP/1.1 200")


# ── with an orchestrator behind it ───────────────────────────────────────────────────────────────


@asynccontextmanager
async def health_port(service: Service) -> AsyncIterator[HealthPort]:
    port = HealthPort(service.parts.health.by_path, "127.0.0.1", 0)
    port.start()
    try:
        yield port
    finally:
        await port.close()


async def until(port: int, path: str, is_so: Callable[[int, dict[str, object]], bool]) -> None:
    """Ask again and again, on a connection each."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            async with http.get(
                f"http://127.0.0.1:{port}{path}", headers={"Connection": "close"}
            ) as response:
                if is_so(response.status, await response.json()):
                    return


async def test_or13_the_port_says_what_the_main_port_says(service: Service) -> None:
    """OR-13: bodies and statuses, at all paths; a drain and a lost instance show."""
    async with health_port(service) as port:
        for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
            status, body = await service.answer("GET", path)
            # load figures in it may change between the two
            shown = {key: value for key, value in body.items() if key != "instances"}

            def same(status_: int, body_: dict[str, object]) -> bool:
                return (status_, body_ | shown) == (status, body_)  # noqa: B023

            await until(port.port, path, same)
        service.parts.lifecycle.refuse_new_work()
        await until(port.port, "/health/ready", lambda s, b: (s, b["status"]) == (503, "draining"))
        await until(port.port, "/health/live", lambda s, b: s == 200)


async def test_a_responder_that_dies_is_replaced(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """A check that comes meanwhile waits, and is answered."""
    async with health_port(service) as port:
        await until(port.port, "/health/live", lambda s, b: s == 200)
        first = port.pid
        os.kill(first, signal.SIGKILL)
        await until(port.port, "/health/live", lambda s, b: s == 200 and port.pid not in (0, first))
    assert "health responder ended; starting it again" in caplog.text


async def test_many_silent_connections_keep_no_check_out(service: Service) -> None:
    """The one that has been silent for longest makes room."""
    async with health_port(service) as port:
        await until(port.port, "/health/live", lambda s, b: s == 200)
        silent = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(300)]
        await until(port.port, "/health/live", lambda s, b: s == 200)
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


@pytest.mark.slow
async def test_lb4_a_loop_that_hangs_shows_and_a_dead_one_refuses(
    worker: FakeWorker, environment: dict[str, str], tmp_path: Path
) -> None:
    """LB-4: the responder never says for longer than it is told that the orchestrator lives."""
    environment |= {"TIDEGATE_INSTANCES": worker.address, "TIDEGATE_HEALTH__PORT": "0"}
    process = await start_process(environment, tmp_path)
    try:
        port = (await log_until(process, "listening for health checks"))["port"]
        assert isinstance(port, int)
        await until(port, "/health/ready", lambda s, b: s == 200)
        process.send_signal(signal.SIGSTOP)
        await until(port, "/health/live", lambda s, b: (s, b["status"]) == (503, "stalled"))
        process.send_signal(signal.SIGCONT)
        await until(port, "/health/live", lambda s, b: s == 200)
    finally:
        process.kill()
        await process.communicate()
    with pytest.raises(aiohttp.ClientConnectionError):
        await until(port, "/health/live", lambda s, b: False)


def test_a_health_port_that_nobody_asked_for_stays_away_where_it_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level("INFO"):
        by_default = HealthSettings.model_construct(set(), port=taken.getsockname()[1])
        settings = settings_of({}).model_copy(update={"health": by_default})
        assert _health_port(settings) is None
    assert MAIN_PORT_ONLY in caplog.text
