"""DL-1 to DL-6 over HTTP: past, too short, in the queue, before and after the first byte."""

import asyncio
import socket
import threading
import time
from typing import Any

import aiohttp
import pytest

from orchestrator.dispatch import time_limits
from orchestrator.prompts.stage import Steps
from tests.orchestrator.api.asking import BODIES, CHAT, TEXT
from tests.orchestrator.api.http.raw import posted
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

GRACE_S = time_limits.REPORT_GRACE_S


def assert_exceeded(
    status: int, headers: Any, error: dict[str, Any], *, is_past: bool = True
) -> None:
    """DL-5; by how much is told once the deadline is past, and not before."""
    assert status == 504
    assert error["code"] == "deadline_exceeded"
    assert ("X-Deadline-Exceeded-By-Ms" in headers) is ("exceeded_by_ms" in error) is is_past
    assert float(headers.get("X-Deadline-Exceeded-By-Ms", "0")) >= 0
    assert headers["x-should-retry"] == "false"
    assert "left=" in headers["X-Deadline-Budget"]


@for_each("path", BODIES)
@for_each(
    ("headers", "body", "is_past"),
    [
        ({"X-Deadline": "2020-01-01T00:00:00Z"}, {}, True),
        ({"X-Timeout-Ms": "9"}, {}, False),
        ({"grpc-timeout": "1n"}, {"deadline_ms": 60_000}, True),
        ({"X-Timeout-Ms": "60000"}, {"deadline_ms": 0}, True),
    ],
)
async def test_dl1_past_or_under_the_floor_is_refused(
    service: Service,
    worker: FakeWorker,
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    is_past: bool,
) -> None:
    """DL-1, DL-3: 504, counted as offered and refused, before any work."""
    before = len(service.outcomes())
    async with service.http.post(path, json=BODIES[path] | body, headers=headers) as response:
        error = (await response.json())["error"]
        assert_exceeded(response.status, response.headers, error, is_past=is_past)
    assert service.outcomes()[before:] == ["refused"]
    assert worker.submits == []


@for_each("path", BODIES)
async def test_dl1_beyond_the_maximum_is_clamped_and_said(
    service: Service, worker: FakeWorker, path: str
) -> None:
    for stream in (False, True):
        body = BODIES[path] | ({"stream": True} if stream and "v1" in path else {})
        headers = {"grpc-timeout": "9H"}
        async with service.http.post(path, json=body, headers=headers) as response:
            assert response.headers["X-Deadline-Clamped-Ms"] == "1800000"
            await response.read()
    assert all(1_790_000 < submit.budget_ms <= 1_800_000 for submit in worker.submits)


@for_each("stream", [False, True])
@for_each("obedient", [True, False])
async def test_dl5_missed_before_the_first_byte_is_a_504(
    service: Service,
    worker: FakeWorker,
    stream: bool,
    obedient: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DL-5, also when the worker does not say so itself."""
    monkeypatch.setattr(time_limits, "REPORT_GRACE_S", 60.0 if obedient else GRACE_S)
    worker.plan = lambda submit: Plan(stall_at=0, ignores_deadline=not obedient)
    body = CHAT | {"deadline_ms": 60_000, "stream": stream}
    path = "/v1/chat/completions"
    async with service.leaping(61, tokens=0), service.http.post(path, json=body) as response:
        error = (await response.json())["error"]
        assert_exceeded(response.status, response.headers, error)
    assert service.outcomes()[-1] == "missed"
    await worker.until(lambda: not worker.running)


@pytest.mark.parametrize("obedient", [True, False])
async def test_dl5_missed_mid_stream_is_a_terminal_error_event(
    service: Service, worker: FakeWorker, obedient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other dialects: tests/orchestrator/api/test_every_dialect.py."""
    if obedient:
        monkeypatch.setattr(time_limits, "REPORT_GRACE_S", 60.0)
    worker.plan = lambda submit: Plan(stall_at=3, ignores_deadline=not obedient)
    task = await service.ask("POST", "/v2/tasks", 202, json=TEXT | {"deadline_ms": 60_000})
    await service.until_tokens(3)
    service.leap(61)
    events = await service.follow(task["events_url"])
    assert [e.event for e in events] == ["queued", "started", *["token"] * 3, "error"]
    assert events[-1].json()["code"] == "deadline_exceeded"
    assert events[-1].json()["budget"]["left_ms"] <= 0
    assert service.outcomes() == ["missed"]
    assert service.metric("tidegate_tokens_wasted_total") == 3
    await worker.until(lambda: not worker.running)


EITHER = pytest.mark.parametrize(
    ("part", "body"), [("", {"deadline_ms": 60_000}), ("first_token", {"first_token_ms": 60_000})]
)


@EITHER
async def test_dl8_what_expires_in_the_queue_never_leaves_it(
    make_worker: MakeWorker, make_service: MakeService, part: str, body: dict[str, Any]
) -> None:
    """DL-8, DL-14: both deadlines hold in the queue, and the next in line takes the free slot."""
    worker = await make_worker(max_running=1)
    first = Plan(stall_at=0)
    worker.plan = lambda submit: first if len(worker.submits) == 1 else Plan()
    service = await make_service(worker, MOST_BACKLOG=0)
    await service.ask("POST", "/v2/tasks", 202, json=TEXT)
    await worker.until(lambda: worker.running == 1)
    asking = asyncio.create_task(service.http.post("/v1/completions", json=TEXT | body))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    service.leap(61)
    async with await asking as response:
        error = (await response.json())["error"]
        assert_exceeded(response.status, response.headers, error)
        assert error.get("part", "") == part
        assert "prefill=0.0" in response.headers["X-Deadline-Budget"]
    assert (await service.ask("POST", "/v2/tasks", 202, json=TEXT))["queue_position"] == 0
    first.release.set()
    await service.until(lambda: sorted(service.outcomes()) == ["met", "met", "missed"])
    assert len(worker.submits) == 2


def stuck(service: Service) -> tuple[threading.Event, threading.Event]:
    """Have no prompt become tokens: set once one is tried, and to be set for it to go on."""
    begun, gate = threading.Event(), threading.Event()
    (encoder,) = service.orchestrator.models.by_name().values()

    def steps(prompt: object) -> Steps[list[int]]:
        begun.set()
        yield False
        assert gate.wait(100)
        return [1]

    encoder.steps = steps  # type: ignore[method-assign]
    return begun, gate


@EITHER
async def test_a_deadline_that_passes_in_the_tokenizer_ends_the_wait(
    service: Service, worker: FakeWorker, part: str, body: dict[str, Any]
) -> None:
    """However long the prompt still takes to become tokens; nothing of it reaches a worker."""
    begun, gate = stuck(service)
    try:
        request = TEXT | body | {"prompt": "x" * 5000}
        asking = asyncio.create_task(service.http.post("/v2/tasks", json=request))
        await service.until(begun.is_set)
        service.leap(61)
        async with await asking as response:
            error = (await response.json())["error"]
            assert_exceeded(response.status, response.headers, error)
            assert error.get("part", "") == part
    finally:
        gate.set()
    assert service.outcomes() == ["refused"]
    assert worker.submits == []


def left_of(response: aiohttp.ClientResponse) -> float:
    """What is left by ``X-Deadline-Budget``, in ms."""
    parts = dict(part.split("=") for part in response.headers["X-Deadline-Budget"].split(";"))
    assert list(parts) == ["queue", "route", "prefill", "decode", "left"]
    return float(parts["left"])


async def test_dl9_a_task_that_was_taken_on_has_its_budget(
    service: Service, worker: FakeWorker
) -> None:
    """DL-9: in the 202, and whenever it is asked for."""
    worker.plan = lambda submit: Plan(stall_at=0)
    body = {"prompt": "x", "deadline_ms": 60_000}
    async with service.http.post("/v2/tasks", json=body) as response:
        assert response.status == 202
        assert 0 < left_of(response) <= 60_000
        url = (await response.json())["events_url"].removesuffix("/events")
    async with service.http.get(url) as response:
        assert 0 < left_of(response) <= 60_000


async def test_dl9_an_error_before_admission_has_the_budget_that_was_stated(
    service: Service,
) -> None:
    """DL-9: as far as it is known by then."""
    stated = {"X-Timeout-Ms": "60000"}
    for path, body in (("/v2/tasks", {"prompt": 1}), ("/v1/chat/completions", {}), ("/v1/no", {})):
        async with service.http.post(path, json=body, headers=stated) as response:
            assert response.status in (400, 404)
            assert 0 < left_of(response) <= 60_000
        async with service.http.post(path, json=body) as response:
            assert 60_000 < left_of(response) <= 300_000, "the one by default"
    async with service.http.get("/v2/no") as response:
        assert "X-Deadline-Budget" not in response.headers, "it asked for nothing that takes time"
    unserved = {"prompt": "x", "model": "nobody", "deadline_ms": 60_000}
    async with service.http.post("/v2/tasks", json=unserved) as response:
        assert response.status == 404
        assert 0 < left_of(response) <= 60_000


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux says when data came")
async def test_dl1_a_deadline_does_not_wait_for_a_busy_loop(
    service: Service, worker: FakeWorker
) -> None:
    """It runs from when the request was there, not from when the loop read it."""
    reader, writer = await asyncio.open_connection(*service.runner.addresses[0][:2])
    await service.ask("GET", "/health/live")  # the connection is accepted by now
    writer.get_extra_info("socket")._sock.send(posted(TEXT | {"deadline_ms": 10_000}, "/v2/tasks"))
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:  # nothing else runs on this loop meanwhile
        pass
    assert b" 202 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await worker.until(lambda: bool(worker.submits))
    assert worker.submits[0].budget_ms <= 9_750


async def test_dl1_a_pipelined_request_has_its_time_from_the_answer_before_on(
    service: Service, worker: FakeWorker
) -> None:
    """The one before it took time of its own, not of a busy loop."""
    release = asyncio.Event()
    worker.plan = lambda submit: Plan(stall_at=0, release=release)
    reader, writer = await asyncio.open_connection(*service.runner.addresses[0][:2])
    second = posted(TEXT | {"deadline_ms": 10_000}, "/v2/tasks")
    writer.write(posted(CHAT) + second)
    await worker.until(lambda: bool(worker.submits))
    await asyncio.to_thread(time.sleep, 0.5)  # the wait is measured in real time
    release.set()
    await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 202"), 5)
    writer.close()
    await worker.until(lambda: len(worker.submits) == 2)
    assert worker.submits[1].budget_ms > 9_600
