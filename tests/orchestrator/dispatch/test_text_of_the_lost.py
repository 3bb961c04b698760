"""DL-6: a client that takes part of its text gets what there is when nobody can go on with it."""

import asyncio
import json
from typing import Any

import pytest

from protocol import Code
from tests.orchestrator.conftest import MakeService, MakeTwo, Service
from tests.orchestrator.dispatch.test_retry import speak
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import read_events

BODY = {"model": "", "prompt": "ab", "max_tokens": 50, "ignore_eos": True, "deadline_ms": 60_000}


async def complete(service: Service, **changes: object) -> tuple[int, Any]:
    """Status and body of a completion that is not streamed."""
    return await service.answer("POST", "/v1/completions", json=BODY | changes)


async def lose(worker: FakeWorker, service: Service, how: str) -> None:
    """Take away the only instance, in mid-text."""
    match how:
        case "dies":
            await worker.stop()
        case "stands still":  # a stopped process: nothing is closed, nothing comes
            worker.silent = True
        case "drains":
            await worker.drain()
            await worker.hand_back()
        case _:
            await service.parts.lifecycle.drain(0.0)


@pytest.mark.parametrize(
    ("how", "on_deadline"),
    [
        ("dies", "partial"),
        ("dies", "fit"),
        ("stands still", "partial"),
        ("drains", "fit"),
        ("the service drains", "partial"),
    ],
)
async def test_dl6_a_text_whose_last_instance_is_gone_is_partial(
    make_service: MakeService, worker: FakeWorker, how: str, on_deadline: str
) -> None:
    """Streaming and not, long before the deadline; with the usage. Who wants all of it gets the
    error, and may go elsewhere."""
    worker.plan = lambda submit: Plan(stall_at=3)
    service = await make_service(worker, SUSPECT_AFTER_S=0.4, DOWN_AFTER_S=0.5)

    async def stream() -> list[Any]:
        body = BODY | {"on_deadline": on_deadline, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with service.http.post("/v1/completions", json=body) as response:
            events = [event.data async for event in read_events(response)]
        return [json.loads(data) for data in events if data not in ("", "[DONE]")]

    asked = [
        asyncio.create_task(complete(service, on_deadline=on_deadline)),
        asyncio.create_task(complete(service)),
    ]
    streaming = asyncio.create_task(stream())
    await service.until_tokens(3, tasks=3)
    await lose(worker, service, how)
    (status, answer), (other_status, other) = await asyncio.gather(*asked)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("w0 w1 w2 ", "deadline")
    assert answer["usage"]["completion_tokens"] == 3
    *_, last, with_usage = await streaming
    assert last["choices"][0]["finish_reason"] == "deadline"
    assert with_usage["usage"]["completion_tokens"] == 3
    assert other_status == 503 and other["error"]["code"] in ("instance_lost", "draining")
    assert sorted(service.outcomes()) == ["failed", "partial", "partial"]


@pytest.mark.parametrize(
    ("code", "on_deadline"),
    [
        (Code.DEADLINE_EXCEEDED, "partial"),
        (Code.DEADLINE_EXCEEDED, "error"),
        (Code.DEADLINE_INFEASIBLE, "partial"),
        (Code.QUEUE_FULL, "partial"),
        (Code.NO_CAPACITY, "partial"),
        (Code.NO_CAPACITY, "error"),
    ],
)
async def test_dl6_a_text_that_its_second_instance_will_not_take_is_partial(
    make_two: MakeTwo, code: Code, on_deadline: str
) -> None:
    """Too little time is left to begin there, or there is no room."""
    service, first, second = await make_two()
    first.plan = lambda submit: Plan(die_at=3, speak=speak)
    second.plan = lambda submit: Plan(refuse=(code, "not here"))
    status, answer = await complete(service, on_deadline=on_deadline, temperature=0)
    assert second.submits
    if on_deadline == "error":
        assert status in (429, 503, 504) and service.outcomes() in (["failed"], ["missed"])
    else:
        assert (status, service.outcomes()) == (200, ["partial"])
        assert answer["choices"][0]["text"] == "cde"
