"""OR-27: an orchestrator that stands still, and what another was asked that it has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from orchestrator.api.http.event_stream import KEEP_ALIVE
from orchestrator.errors import NotReady
from orchestrator.ids import TAG_DIGITS
from orchestrator.state import forwarding
from tests.orchestrator.conftest import Service
from tests.orchestrator.state.conftest import Sharing, freeze, is_dead, see_each_other, state_of
from tests.orchestrator.tasks.journal.conftest import events_of, running, speaking, task_of
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.rough_network import RoughNetwork, rough_network
from tests.support.sse import read_events

HOLDS_ON = {"LEASE_S": 30.0}
"""A lease that does not end within a test."""


@pytest.fixture
async def way() -> AsyncIterator[RoughNetwork]:
    """How others reach the first orchestrator: cut, it answers nobody and closes nothing."""
    async with rough_network(0) as found:
        yield found


async def pair(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork, **changes: object
) -> tuple[Service, Service]:
    one = await sharing.member(worker, state__advertise=f"http://127.0.0.1:{way.port}", **changes)
    way.target = urlsplit(one.url).port or 0
    two = await sharing.member(worker, **changes)
    await see_each_other(one, two)
    return one, two


def stop(service: Service, way: RoughNetwork) -> None:
    """The orchestrator is stopped (SIGSTOP), as another sees it."""
    way.partition()
    freeze(service)


@asynccontextmanager
async def asked(
    service: Service, method: str, path: str, **options: Any
) -> AsyncIterator["asyncio.Task[tuple[int, Any]]"]:
    """A request that another has been handed by now."""
    before = state_of(service).forwarded
    asking = asyncio.create_task(service.answer(method, path, **options))
    try:
        await service.until(lambda: state_of(service).forwarded > before or asking.done())
        yield asking
    finally:
        asking.cancel()


async def session_of(service: Service) -> str:
    session: dict[str, str] = await service.ask("POST", "/v2/sessions", 201, json={})
    return session["session_id"]


async def test_or27_a_turn_whose_session_stands_still_ends_by_its_own_deadline(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork
) -> None:
    one, two = await pair(sharing, worker, way, **HOLDS_ON)
    session_id = await session_of(one)
    way.partition()
    turn = {"prompt": "hi", "session_id": session_id, "deadline_ms": 300}
    async with asked(two, "POST", "/v2/tasks", json=turn) as asking:
        status, answer = await asking
    assert status == 504 and answer["error"]["code"] == "deadline_exceeded", answer
    async with asked(
        two, "DELETE", f"/v2/sessions/{session_id}", headers={"X-Timeout-Ms": "300"}
    ) as asking:
        assert (await asking)[0] == 504


async def test_or27_what_a_stopped_orchestrator_was_asked_is_answered_once_its_lease_ends(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork
) -> None:
    one, two = await pair(sharing, worker, way)
    session_id = await session_of(one)
    task_id = await running(one, worker)
    plan = speaking(two, shift=0, stall_at=4)
    worker.plan = lambda job: plan
    stop(one, way)
    turn = {"prompt": "hi", "session_id": session_id, "durable": False}
    async with (
        asked(two, "GET", f"/v2/tasks/{task_id}") as status,
        asked(two, "POST", f"/v2/tasks/{task_id}/cancel") as cancel,
        asked(two, "POST", "/v2/tasks", json=turn) as said,
        asked(two, "GET", f"/v2/sessions/{session_id}") as session,
    ):
        assert not any(each.done() for each in (status, cancel, said, session))
        code, answer = await status
        assert (code, answer["task_id"]) == (200, task_id), answer
        code, answer = await cancel
        assert (code, answer["task_id"]) == (202, task_id), answer
        assert (await said)[0] == 202 and (await session)[0] == 200
    assert (await events_of(two, task_id))[-1].json()["outcome"] == "aborted"


async def test_or27_who_has_a_task_is_not_said_to_be_nobody_while_the_store_is_away(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork
) -> None:
    one, two = await pair(sharing, worker, way)
    task_id = await running(one, worker)
    worker.plan = lambda job: Plan(stall_at=1)
    state_of(two)._takeover.close()  # type: ignore[union-attr]
    stop(one, way)
    await two.until(lambda: is_dead(two, one))
    await sharing.store.kill()
    async with two.http.get(f"/v2/tasks/{task_id}") as response:
        assert (response.status, "Retry-After" in response.headers) == (503, True)
    shared = state_of(two)
    for asking in (  # as when the store goes between the two looks
        shared.holder_of(shared.tasks.tag + task_id[TAG_DIGITS:]),
        shared.is_living(task_id),
    ):
        with pytest.raises(NotReady):
            await asking


async def test_or23_a_stream_of_an_orchestrator_that_stands_still_is_kept_alive_and_then_cut(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork
) -> None:
    one, two = await pair(sharing, worker, way, streams__keepalive_s=0.1)
    worker.plan = lambda job: Plan(stall_at=2)
    task_id = await task_of(one, durable=False)
    async with two.http.get(f"/v2/tasks/{task_id}/events") as stream:
        events = aiter(read_events(stream))
        while (await anext(events)).event != "token":
            pass
        await stream.content.readuntil(KEEP_ALIVE)
        way.partition()
        for _ in range(3):
            await stream.content.readuntil(KEEP_ALIVE)
        freeze(one)
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.content.read()


async def test_or23_a_stream_has_headers_and_keep_alives_while_the_lease_decides(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its events from the orchestrator that took the task on, or why there will be none."""
    monkeypatch.setattr(forwarding, "HEADERS_WITHIN_S", 0.05)
    one, two = await pair(sharing, worker, way, streams__keepalive_s=0.05)
    task_id = await running(one, worker)
    lost_id = await task_of(one, durable=False)
    worker.plan = lambda job: Plan()
    way.partition()
    async with (
        two.http.get(f"/v2/tasks/{task_id}/events") as stream,
        two.http.get(f"/v2/tasks/{lost_id}/events") as lost,
    ):
        for each in (stream, lost):
            assert each.status == 200 and each.content_type == "text/event-stream"
            await each.content.readuntil(KEEP_ALIVE)
            await each.content.readuntil(KEEP_ALIVE)
        freeze(one)
        *_, end = [event async for event in read_events(stream)]
        assert end.json()["outcome"] == "met"
        *_, error = [event async for event in read_events(lost)]
    assert error.event == "error" and error.json()["error"]["code"] == "instance_lost"
    async with two.http.get(f"/v2/tasks/{lost_id}") as response:
        assert response.status == 410 and response.headers["x-should-retry"] == "false"
        assert "start again" in (await response.json())["error"]["message"]


async def test_or27_a_streamed_answer_of_one_that_stands_still_ends_with_its_deadline(
    sharing: Sharing, worker: FakeWorker, way: RoughNetwork
) -> None:
    one, two = await pair(sharing, worker, way, **HOLDS_ON)
    said = {"model": "fake", "input": "hi", "max_output_tokens": 2}
    earlier = (await one.ask("POST", "/v1/responses", json=said))["id"]
    worker.plan = lambda job: Plan(stall_at=1)
    more = {"previous_response_id": earlier, "stream": True, "deadline_ms": 600}
    async with two.http.post("/v1/responses", json=said | more) as response:
        await response.content.readline()
        way.partition()
        text = (await response.content.read()).decode()
    last = text.rstrip().rpartition("\n\n")[2]
    assert last.startswith("event: error") and "deadline_exceeded" in last
