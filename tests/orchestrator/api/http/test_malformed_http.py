"""What no HTTP parser takes is answered in our shape, and no word of it is logged (OR-16)."""

import asyncio
import json
import logging

import pytest

from orchestrator.api.http import connection
from tests.orchestrator.api.http.raw import connect
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

SECRET = b"sk-planted-4711"
HEADERS = (
    b"Host: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer "
    + SECRET
    + b"\r\n"
)
BODY = b'{"prompt": "' + SECRET + b'"}'


def post(headers: bytes = b"", body: bytes = BODY, path: bytes = b"/v2/tasks") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HEADERS + headers + b"\r\n" + body


def sized(body: bytes = BODY, headers: bytes = b"", path: bytes = b"/v2/tasks") -> bytes:
    return post(b"Content-Length: %d\r\n" % len(body) + headers, body, path)


MALFORMED = {
    "a length counted in characters": sized()[:-3] + b"\xc3\xbc" * 3 + b'"}',
    "no length": post(),
    "two lengths": post(b"Content-Length: 3\r\nContent-Length: 4\r\n"),
    "a length that is none": post(b"Content-Length: " + SECRET + b"\r\n"),
    "length and chunks": sized(headers=b"Transfer-Encoding: chunked\r\n"),
    "a wrong chunk size": post(b"Transfer-Encoding: chunked\r\n", SECRET + b"\r\n" + BODY),
    "an unknown transfer encoding": post(b"Transfer-Encoding: " + SECRET + b"\r\n"),
    "a key with a newline in it": sized(headers=b"X-Api-Key: a\n" + SECRET + b"\r\n"),
    "a header without a colon": sized(headers=SECRET + b"\r\n"),
    "a header with a NUL": sized(headers=b"X-A: " + SECRET + b"\0\r\n"),
    "a header that is too long": sized(headers=b"X-A: " + SECRET * 1000 + b"\r\n"),
    "too many headers": sized(headers=b"".join(b"X-%d: 1\r\n" % i for i in range(500))),
    "a path that is too long": sized(path=b"/" + SECRET * 1000),
    "a path with a space": sized(path=b"/v2/" + SECRET + b" x"),
    "another version": b"POST /v2/tasks HTTP/9.9\r\n" + HEADERS + b"\r\n",
    "no request at all": SECRET + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET + b"\r\n\r\n",
    "an encoding that is no text": sized(headers=b"Content-Encoding: \xff\r\n"),
    "an unknown expectation": sized(headers=b"Expect: " + SECRET + b"\r\n"),
    "an expectation that is no text": sized(headers=b"Expect: \xec" + SECRET + b"\r\n"),
    "CONNECT": b"CONNECT /v1/chat/completions HTTP/1.1\r\n" + HEADERS + b"\r\n",
    "an upgrade": b"GET /v1/completions HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    + HEADERS
    + b"\r\n"
    + SECRET,
}


async def exchange(service: Service, request: bytes) -> bytes:
    """All that comes for ``request`` until nothing more does; its client says no more."""
    reader, writer = await asyncio.open_connection(*service.runner.addresses[0][:2])
    answer = b""
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            answer += await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.partition(b":")[2])
                for line in answer.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            )
            answer += await reader.readexactly(length)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, StopIteration):
        pass
    finally:
        writer.close()
    return answer


@for_each("what", MALFORMED)
async def test_or16_malformed_requests_are_answered_in_our_shape_and_leave_no_trace(
    service: Service, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    answer = await exchange(service, MALFORMED[what])
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    assert 400 <= status < 500, answer
    assert headers[b"content-type"].startswith(b"application/json")
    assert headers[b"x-correlation-id"]
    error = json.loads(body)["error"]
    assert error["code"] and error["message"]
    assert SECRET not in answer
    said = [logging.Formatter().format(record) for record in caplog.records]
    said += [str(vars(record)) for record in caplog.records]
    assert not [line for line in said if SECRET.decode() in line or "Traceback" in line]
    assert (await exchange(service, sized(b'{"prompt": "x", "max_tokens": 1}'))).startswith(
        b"HTTP/1.1 202"
    )


async def test_silent_connections_are_closed(
    make_service: MakeService, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they said nothing, half a header, or were served before."""
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.05)
    service = await make_service(worker, http__idle_timeout_s=0.1)
    half = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
    for request in (b"", half, half + b"\r\n"):
        reader, writer = await asyncio.open_connection(*service.runner.addresses[0][:2])
        writer.write(request)
        async with asyncio.timeout(60):
            await reader.read()  # to its end
        writer.close()


async def test_connections_are_bounded_and_the_last_are_for_operators(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """One address gets three quarters of what is for all; nobody gets more than all."""
    service = await make_service(worker, http__max_connections=40)
    address = service.runner.addresses[0][:2]
    silent = [await asyncio.open_connection(*address) for _ in range(18)]
    submit = sized(b'{"prompt": "x", "max_tokens": 1}')
    head, _, body = (await exchange(service, submit)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after" in head.lower()
    assert json.loads(body)["error"]["code"] == "no_capacity"
    probe = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await exchange(service, probe)).startswith(b"HTTP/1.1 200")
    # Who is silent makes room for the next.
    silent += [await asyncio.open_connection(*address) for _ in range(50)]
    assert (await exchange(service, probe)).startswith(b"HTTP/1.1 200")
    for _, writer in silent:
        writer.close()
    async with asyncio.timeout(60):
        while not (await exchange(service, submit)).startswith(  # noqa: ASYNC110 - until they are gone
            b"HTTP/1.1 202"
        ):
            await asyncio.sleep(0.01)


MANY = b"GET /page/vendor/uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60
"""Requests whose answers are large and cost nothing to make."""


async def test_connections_that_read_nothing_make_room_too(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """What is still to be sent to them is dropped, or they would stand for ever, uncounted."""
    service = await make_service(worker, http__max_connections=40)
    clients = [await connect(service, MANY, receive_buffer=2048) for _ in range(60)]
    probe = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await exchange(service, probe)).startswith(b"HTTP/1.1 200")
    assert service.runner.server is not None
    # Three quarters of 24, 16 for operators, and 20 that are being turned away.
    assert len(service.runner.server.connections) <= 18 + 16 + 20
    for client in clients:
        client.close()


async def test_a_client_that_reads_nothing_is_dropped(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "VANISHED_S", 1)
    client = await connect(service, MANY, receive_buffer=2048)
    server = service.runner.server
    assert server is not None
    await service.until(lambda: server.requests_count > 0)
    await service.until(lambda: not server.connections)
    client.close()
