"""OR-18: several orchestrators as one. What one has accepted, all of them answer for."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from orchestrator.state.members import Holder
from orchestrator.state.takeover import Takeover
from orchestrator.state.tasks import SharedReader
from tests.orchestrator.conftest import OPERATOR, Service
from tests.orchestrator.state.conftest import Sharing, freeze, is_dead, state_of, until_in_store
from tests.orchestrator.tasks.journal.conftest import (
    events_of,
    running,
    speaking,
    status_of,
    submit,
    task_of,
)
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import read_events


async def test_a_task_is_asked_for_and_cancelled_at_any_member(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await sharing.members(worker)
    worker.plan = lambda job: Plan(stall_at=1)
    for durable in (True, False):
        task_id = await task_of(one, durable=durable)
        await one.until_tokens(1)
        there = await status_of(two, task_id)
        assert there["status"] == "running" and there["task_id"] == task_id
        async with two.http.get(f"/v2/tasks/{task_id}/events") as stream:
            first = await anext(aiter(read_events(stream)))
            assert first.event == "queued"
            await two.ask("POST", f"/v2/tasks/{task_id}/cancel", 202)
            rest = [event async for event in read_events(stream)]
        assert rest[-1].event == "error" and "cancelled" in rest[-1].data
        await one.until(lambda: not one.orchestrator.live_tasks)


async def test_what_a_member_has_that_has_just_joined_is_found(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await sharing.members(worker)
    worker.plan = lambda job: Plan(stall_at=1)
    task_id = await task_of(one, durable=False)
    state_of(two).members.others.clear()  # as before the next renewal of the lease
    assert (await status_of(two, task_id))["task_id"] == task_id


async def test_a_member_is_asked_at_once_while_the_store_hangs(
    sharing: Sharing, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the task of a live member, no look waits for a store that is known not to answer."""
    one, two = await sharing.members(worker)
    worker.plan = lambda job: Plan(stall_at=1)
    task_id = await task_of(one, durable=False)
    members = state_of(two).members
    freeze(two)
    members.fault = "the store did not answer within 2 s"
    with monkeypatch.context() as hanging:
        hanging.delattr(SharedReader, "_look")
        hanging.delattr(members, "client")
        assert (await status_of(two, task_id))["task_id"] == task_id


@pytest.mark.parametrize("damage", [{"row": b"\xff"}, {"other": b""}])
async def test_a_task_whose_record_is_damaged_in_the_store_is_said_to_be_gone(
    sharing: Sharing, worker: FakeWorker, damage: dict[str, bytes]
) -> None:
    one = await sharing.member(worker)
    async with sharing.store.client() as client:
        await client.hset("{tidegate}:task:" + 32 * "0", mapping=damage)
    await one.ask("GET", f"/v2/tasks/{32 * '0'}", 410)


async def test_a_record_of_another_type_keeps_no_task_from_being_taken_on(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await sharing.members(worker)
    task_id = await running(one, worker)
    names, odd = state_of(one).tasks.names, ["0" * 32, "1" * 32]
    async with sharing.store.client() as client:
        await client.sadd(names.held(state_of(one).tasks.tag), *odd)
        await client.set(names.task(odd[0]), "?")
        await client.hset(names.task(odd[1]), "request", "")
        await client.set(names.tokens(odd[1]), "?")
    worker.plan = lambda job: speaking(two, shift=0)
    freeze(one)
    await two.until(lambda: state_of(two).taken == 1)
    assert (await events_of(two, task_id))[-1].event == "end"


async def test_a_task_that_is_being_taken_on_is_not_said_to_be_gone(
    sharing: Sharing, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store says whose it is before that one has read what it is."""
    one, two, three = await sharing.members(worker, count=3)
    task_id = await running(one, worker)
    take, claimed, go_on = Takeover._take, list[str](), asyncio.Event()

    async def held(self: Takeover, ids: Sequence[str], tag: str) -> None:
        claimed.extend(ids)
        await go_on.wait()
        await take(self, ids, tag)

    monkeypatch.setattr(Takeover, "_take", held)
    freeze(one)
    await two.until(lambda: claimed == [task_id])
    for asked in (two, three):
        async with asked.http.get(f"/v2/tasks/{task_id}") as response:
            assert (response.status, "Retry-After" in response.headers) == (503, True)
    worker.plan = lambda job: speaking(two, shift=0)
    go_on.set()
    for asked in (two, three):
        await asked.until(lambda: state_of(two).taken + state_of(three).taken == 1)
        assert (await events_of(asked, task_id))[-1].event == "end"


@pytest.mark.parametrize("dies", [False, True])
async def test_a_task_that_ends_while_it_is_looked_for_is_found(
    sharing: Sharing, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Its end is in the store even where the orchestrator that wrote it is dead by then."""
    one, two = await sharing.members(worker)
    plan = worker.does(Plan(stall_at=1))
    task_id = await task_of(one)
    await one.until_tokens(1)
    if dies:
        state_of(two)._takeover.close()  # type: ignore[union-attr]
        freeze(one)
        await two.until(lambda: is_dead(two, one))
    holder_of = state_of(two).holder_of

    async def later(item_id: str) -> Holder | None:
        plan.release.set()
        await until_in_store(sharing.store, task_id, "end")
        return await holder_of(item_id)

    monkeypatch.setattr(state_of(two), "holder_of", later)
    assert (await status_of(two, task_id))["outcome"] == "met"


async def test_a_member_that_stood_still_lets_go_of_what_others_took_on(
    sharing: Sharing, worker: FakeWorker
) -> None:
    """No task has two ends: what the first one still writes is refused by the store."""
    one, two = await sharing.members(worker)
    plans = [Plan(stall_at=4), Plan(stall_at=6)]
    worker.plan = lambda job: plans[min(len(worker.submits), 2) - 1]
    task_id = await task_of(one, max_tokens=10)
    await one.until_tokens(4)
    async with one.http.get(f"/v2/tasks/{task_id}/events") as stream:
        freeze(one)
        await two.until(lambda: state_of(two).taken == 1)
        plans[0].release.set()
        await one.until(lambda: one.journal.lost + one.journal.outdone == 1)
        with pytest.raises(aiohttp.ClientPayloadError):
            async for event in read_events(stream):
                assert event.event not in ("end", "error")
    plans[1].release.set()
    assert (await events_of(two, task_id))[-1].event == "end"


async def test_a_submission_has_one_task_whichever_member_it_comes_to(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await sharing.members(worker)
    held = worker.does(Plan(stall_at=1))
    first = await submit(one, "order-17")
    again: Any = await submit(two, "order-17")
    assert (first[0], again[0]) == (202, 202)
    assert first[1]["task_id"] == again[1]["task_id"]
    other = await submit(two, "order-17", prompt="something else")
    assert other[0] == 422
    held.release.set()
    await one.until(lambda: not one.orchestrator.live_tasks)
    ended = await submit(two, "order-17")
    assert ended[1]["task_id"] == first[1]["task_id"]
    assert len(worker.submits) == 1


async def test_an_instance_that_is_drained_at_one_member_is_drained_at_all(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await sharing.members(worker)
    at = f"/v2/instances/{worker.address}"
    await one.ask("POST", f"{at}/drain", 202, headers=OPERATOR)
    (there,) = two.orchestrator.registry
    await two.until(lambda: there.cordoned)
    await two.ask("POST", f"{at}/undrain", 202, headers=OPERATOR)
    (here,) = one.orchestrator.registry
    await one.until(lambda: not here.cordoned)


async def test_slots_of_a_member_that_died_go_to_those_that_live(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two, three = await sharing.members(worker, count=3)
    slots = next(iter(one.orchestrator.registry)).concurrency.slots

    def shares(*services: Service) -> list[int | None]:
        return [next(iter(service.orchestrator.registry)).share for service in services]

    worker.plan = lambda job: Plan(stall_at=1)
    for _ in range(slots // 2):
        await task_of(one, durable=False)
    await one.until(lambda: (shares(one)[0] or 0) > slots // 2)
    await one.until(lambda: sum(share or 0 for share in shares(one, two, three)) == slots)
    part = one.orchestrator.registry.capacity("fake").part
    assert part == pytest.approx((shares(one)[0] or 0) / slots)
    freeze(one)
    await two.until(lambda: shares(two, three) == [slots // 2] * 2)
    async with sharing.store.client() as client:
        told = await client.hgetall("{tidegate}:demands:" + worker.address)
    assert {tag.decode() for tag in told} == {state_of(each).tasks.tag for each in (two, three)}


def calls_of(service: Service) -> list[int]:
    """Calls to come of each run that an orchestrator knows."""
    by_key = service.orchestrator.runs._by_key
    return [run.calls for own in by_key.values() for run in own.values()]


async def test_a_run_has_one_deadline_at_all_members(sharing: Sharing, worker: FakeWorker) -> None:
    """DL-22."""
    one, two = await sharing.members(worker)
    call = {"prompt": "hi", "max_tokens": 2, "session_id": "a-trip"}
    first = call | {"calls_left": 2, "deadline_ms": 60_000}
    await one.ask("POST", "/v2/tasks", 202, json=first)
    await two.until(lambda: calls_of(two) == [2])
    async with two.http.post("/v2/tasks", json=call) as response:
        assert (response.status, response.headers["X-Deadline-Source"]) == (202, "run")
        left_ms = float(response.headers["X-Deadline-Budget"].rpartition("left=")[2])
        assert 30_000 < left_ms <= 60_000
    await one.until(lambda: calls_of(one) == calls_of(two) == [1])
