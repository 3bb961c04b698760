"""``/v2/overview``: what it tells, to whom, and that it costs nothing while nobody watches."""

from contextlib import AsyncExitStack

import pytest

from orchestrator.api.operator import overview
from orchestrator.api.operator.overview import OVERVIEW, Overview
from tests.orchestrator.conftest import MakeService, MakeWorker, Service, bearer
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import read_events

TASK = {"prompt": "a secret of mine", "max_tokens": 3, "tenant": "acme"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "EVERY_S", 0.02)


def overview_of(service: Service) -> Overview:
    return service.runner.app[OVERVIEW]


async def submit(service: Service, **more: object) -> None:
    await service.ask("POST", "/v2/tasks", 202, json=TASK | more)


async def test_who_waits_is_told_in_order_without_a_word_of_theirs(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(max_running=2)
    service = await make_service(worker, MOST_BACKLOG=0)
    worker.plan = lambda submit: Plan(stall_at=0)
    for _ in range(4):
        await submit(service, deadline_ms=60_000)
    await submit(service, deadline_ms=5_000)
    told = await service.ask("GET", "/v2/overview")
    first = told["queue"]["first"]
    assert len(first) == 3
    assert first[0]["left_ms"] == min(task["left_ms"] for task in first)
    assert first[0]["tenant"] == "acme"
    assert "secret" not in str(told)


async def test_watchers_share_snapshots_that_nobody_else_pays_for(service: Service) -> None:
    watched = overview_of(service)
    async with service.http.get("/v2/overview/events") as first:
        assert first.content_type == "text/event-stream"
        one = read_events(first)
        assert (await anext(one)).event == "overview"
        async with service.http.get("/v2/overview/events") as second:
            other = read_events(second)
            assert len(watched.watchers) == 2
            firsts, others = set[str](), set[str]()
            while not firsts & others:  # one may have missed what the other got
                firsts.add((await anext(one)).data)
                others.add((await anext(other)).data)
    await service.until(lambda: not watched.watchers)
    assert watched._taking is None


async def test_a_miss_is_counted_by_its_stage_and_not_by_its_code_as_well(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=1)
    async with service.leaping(21, tokens=1):
        await submit(service, deadline_ms=20_000)
    await service.until(lambda: service.outcomes() == ["missed"])
    told = await service.ask("GET", "/v2/overview")
    assert told["codes"] == {}
    assert sum(told["blame"].values()) == told["totals"]["missed"] == 1


async def test_no_key_no_overview_and_others_stay_unnamed(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(max_running=2)
    rights = {"is_admin": True, "names_tenants": True}
    keys = {"boss": {"token": "boss", **rights}, "plain": {"token": "plain"}}
    service = await make_service(worker, keys=keys, MOST_BACKLOG=0)
    for path in ("/v2/overview", "/v2/overview/events"):
        await service.ask("GET", path, 401)
    worker.plan = lambda submit: Plan(stall_at=0)
    boss, plain = ({"x-api-key": name} for name in ("boss", "plain"))
    for _ in range(3):
        await service.ask("POST", "/v2/tasks", 202, json=TASK, headers=boss)
    assert "acme" in str(await service.ask("GET", "/v2/overview", headers=boss))
    told = await service.ask("GET", "/v2/overview", headers=plain)
    assert len(told["queue"]["first"]) == 1
    assert "tenant" not in told["queue"]["first"][0]


async def test_watchers_are_bounded_and_hold_up_no_end(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_WATCHERS", 1)
    async with service.http.get("/v2/overview/events") as first:
        await service.ask("GET", "/v2/overview/events", 503)
        overview_of(service).close()
        events = [event.event async for event in read_events(first)]
        assert events[0] == "overview"


async def test_or24_a_key_leaves_places_for_watchers_with_others(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_WATCHERS", 4)
    keys = {"loud": {"token": "loud-token"}, "calm": {"token": "calm-token"}}
    service = await make_service(worker, keys=keys)

    async def watch(key: str) -> int:
        watching = service.http.get("/v2/overview/events", headers=bearer(f"{key}-token"))
        return (await open_ones.enter_async_context(watching)).status

    async with AsyncExitStack() as open_ones:
        assert [await watch("loud") for _ in range(5)] == [200] * 3 + [503] * 2
        assert await watch("calm") == 200
