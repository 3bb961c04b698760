"""Clients that go away or read too slowly (WP-1, OR-11)."""

import asyncio
import json

import pytest

from orchestrator.api.http import event_stream
from orchestrator.errors import TidegateError
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import failed
from protocol import AbortCause
from tests.orchestrator.api.http.raw import AT, CHAT, connect, read_to_end, send
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan


def fail(service: Service, task: Task) -> None:
    """As if a fault of ours had ended it."""
    service.orchestrator.stages.settler.settle(task, failed(TidegateError("a fault")))


@for_each(
    ("path", "stream", "stall_at"),
    [
        (AT, False, 0),
        (AT, True, 3),
        ("/v1/messages", True, 0),
        ("/v1/responses", True, 3),
        ("/v1/responses", False, 3),
    ],
)
async def test_wp1_a_closed_socket_stops_the_job(
    service: Service, worker: FakeWorker, stream: bool, stall_at: int, path: str
) -> None:
    """WP-1: streaming and not, before and after the first byte."""
    worker.cancels.clear()
    before = len(service.outcomes())
    noticed = service.metric("tidegate_client_disconnect_detection_ms_count")
    worker.plan = lambda submit: Plan(stall_at=stall_at)
    asked = {"model": "fake", "input": "x"} if path == "/v1/responses" else CHAT
    client = await send(service, asked | {"stream": stream}, path=path)
    await worker.until(lambda: worker.running == 1)
    if stream and stall_at:
        await asyncio.get_running_loop().sock_recv(client, 4096)
    client.close()
    await worker.until(lambda: not worker.running)
    assert [cancel.cause for cancel in worker.cancels] == [AbortCause.DISCONNECT]
    await service.until(lambda: service.outcomes()[before:] == ["aborted"])
    await service.until(
        lambda: service.metric("tidegate_client_disconnect_detection_ms_count") == noticed + 1
    )
    assert next(iter(service.orchestrator.registry)).load == 0


async def test_a_client_gone_while_it_waits_in_the_queue(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(max_running=1)
    worker.plan = lambda submit: Plan(stall_at=0)
    service = await make_service(worker, MOST_BACKLOG=0)
    first = await send(service, CHAT)
    await worker.until(lambda: worker.running == 1)
    second = await send(service, CHAT)
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    second.close()
    await service.until(lambda: service.outcomes() == ["aborted"])
    assert len(service.orchestrator.queue) == 0
    first.close()
    await worker.until(lambda: not worker.running)
    assert len(worker.submits) == 1


LARGE = Plan(tokens=500, per_delta=20, text=lambda index: f"{index:06}" + "x" * 8000)
"""4 MB: more than the kernel's buffers take of a client with a small one."""


async def test_or11_a_client_that_pauses_gets_everything_in_the_end(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-11: what it does not read yet waits for it, in order, and nobody else waits."""
    worker.plan = lambda submit: LARGE if submit.sampling.max_tokens == 20 else Plan()
    service = await make_service(worker, CLIENT_BUFFER_BYTES=64 << 20)
    slow = await send(service, CHAT | {"stream": True}, receive_buffer=4096)
    await service.until(lambda: service.outcomes() == ["met"])
    body = CHAT | {"max_tokens": 9, "stream": True}
    assert (await service.ask("POST", "/v1/chat/completions", json=body)).count("data: ") == 9 + 3
    data = await read_to_end(slow)
    slow.close()
    events = [event for event in _unchunked(data).split(b"\n\n") if event]
    assert len(events) == 500 + 3
    contents = [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events[1:-2]]
    assert [int(content[:6]) for content in contents] == list(range(500))


async def test_or11_a_client_that_stays_too_slow_is_disconnected(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-11: its buffer is bounded; it is given up, its job stopped, and nobody else notices."""
    worker.plan = lambda submit: LARGE if submit.sampling.max_tokens == 20 else Plan()
    service = await make_service(worker, CLIENT_BUFFER_BYTES=1 << 20)
    slow = await send(service, CHAT | {"stream": True}, receive_buffer=4096)
    await service.until(lambda: service.outcomes() == ["aborted"])
    await worker.until(lambda: not worker.running)
    assert [cancel.cause for cancel in worker.cancels] == [AbortCause.DISCONNECT]
    slow.close()
    body = CHAT | {"max_tokens": 9}
    await service.ask("POST", "/v1/chat/completions", json=body)


async def test_or11_metrics_are_dropped_for_a_client_that_is_behind_and_tokens_are_not(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OR-11, OR-1: metrics come among the tokens, unnumbered, and are the first to go."""
    monkeypatch.setattr("orchestrator.api.native.events.METRICS_EVERY_S", 1e-6)
    worker.plan = lambda submit: LARGE if submit.sampling.max_tokens == 20 else Plan(step_s=0.01)
    service = await make_service(
        worker, CLIENT_BUFFER_BYTES=64 << 20, KEPT_TASKS={"keep_bytes": 10**9}
    )

    async def follow(max_tokens: int, *, pause: bool) -> list[str]:
        body = {"prompt": "x", "max_tokens": max_tokens}
        url = (await service.ask("POST", "/v2/tasks", 202, json=body))["events_url"]
        asked = f"GET {url} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        client = await connect(service, asked, receive_buffer=4096)
        if pause:
            ends = len(service.outcomes()) + 1
            await service.until(lambda: len(service.outcomes()) == ends)
        data = await read_to_end(client)
        client.close()
        return _unchunked(data).decode().split("\n\n")[:-1]

    prompt_reader = await follow(10, pause=False)
    metrics = [event for event in prompt_reader if event.startswith("event: metrics")]
    assert 1 <= len(metrics) <= 10
    assert json.loads(metrics[-1].partition("data: ")[2])["completion_tokens"] >= 2
    events = await follow(20, pause=True)
    numbers = [int(e.split("\n")[0].removeprefix("id: ")) for e in events if e.startswith("id: ")]
    assert numbers == list(range(2 + 500 + 1))
    assert sum(event.startswith("event: metrics") for event in events) < 50


async def test_or11_a_silent_stream_says_that_it_lives(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """Comments between events, after the headers only."""
    plan = worker.does(Plan(stall_at=1))
    service = await make_service(worker, streams__keepalive_s=0.02)
    raw = await send(service, CHAT | {"stream": True})
    data = bytearray()
    while data.partition(b"w0")[2].count(b": still there") < 3:
        data += await asyncio.get_running_loop().sock_recv(raw, 65536)
    plan.release.set()
    data += await read_to_end(raw)
    raw.close()
    between = data[data.index(b"w0") : data.index(b"w1")]
    assert between.count(b": still there") >= 3


@pytest.mark.parametrize("ends", ["well", "in error"])
@for_each(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "fake", "prompt": "x"}),
        ("/v1/responses", {"model": "fake", "input": "x"}),
        ("/v1/messages", CHAT),
    ],
)
async def test_or23_a_stream_that_waits_has_headers_and_then_its_events_or_its_error(
    service: Service,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, object],
    ends: str,
) -> None:
    monkeypatch.setattr(event_stream, "HEADERS_WITHIN_S", 0.01)
    plan, before = Plan(stall_at=0), len(service.outcomes())
    worker.plan = lambda submit: plan
    await worker.until(lambda: not worker.running)
    asked = service.http.post(f"{service.url}{path}", json=body | {"stream": True})
    async with asked as answer:  # with its headers
        assert answer.status == 200
        assert await answer.content.readline() == b": still there\n"
        await worker.until(lambda: worker.running == 1)
        if ends == "well":
            plan.release.set()
        else:
            for task in list(service.orchestrator._live):
                fail(service, task)
        rest = await answer.content.read()
    assert (b"a fault" in rest) == (ends == "in error")
    assert (b"w0" in rest) == (ends == "well")
    await service.until(lambda: len(service.outcomes()) == before + 1)
    assert service.outcomes()[-1] == ("met" if ends == "well" else "failed")


async def test_or23_what_is_refused_before_the_headers_keeps_its_status(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=0)
    asked = asyncio.create_task(
        service.http.post(f"{service.url}/v1/chat/completions", json=CHAT | {"stream": True})
    )
    await worker.until(lambda: worker.running == 1)
    [task] = service.orchestrator._live
    fail(service, task)
    async with await asked as answer:
        assert answer.status == 500
        assert (await answer.json())["error"]["message"] == "a fault"


def _unchunked(response: bytearray) -> bytes:
    place = response.index(b"\r\n\r\n") + 4
    parts = []
    while place < len(response):
        end = response.index(b"\r\n", place)
        length = int(response[place:end], 16)
        parts.append(response[end + 2 : end + 2 + length])
        place = end + 2 + length + 2
    return b"".join(parts)
