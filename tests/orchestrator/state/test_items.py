"""OR-18: what clients keep outlives the orchestrator that had it: sessions and responses."""

import asyncio
from typing import Any

from protocol import FinishReason
from tests.orchestrator.conftest import Service
from tests.orchestrator.state.conftest import Sharing, freeze, is_dead, see_each_other, state_of
from tests.orchestrator.tasks.journal.conftest import submit
from tests.support.fake_worker import FakeWorker, Plan

HI: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 4}
WELL = Plan(tokens=2, reason=FinishReason.STOP)


async def copied(service: Service) -> None:
    """All that changed is in the store, and not only on its way there."""
    items = state_of(service).items
    await service.until(lambda: items._writing is None or items._writing.done())


async def two_of(sharing: Sharing, worker: FakeWorker) -> list[Service]:
    worker.plan = lambda job: WELL
    return await sharing.members(worker)


async def kill(victim: Service, seer: Service) -> None:
    """End an orchestrator without a word, and wait until another knows."""
    freeze(victim)
    await seer.until(lambda: is_dead(seer, victim))


async def thaw(service: Service) -> None:
    """Let a frozen orchestrator go on, as one that only stood still."""
    members = state_of(service).members
    del members._renew
    members._renewing = asyncio.create_task(members._renew_for_ever())
    lapses: list[None] = []
    members.on_lapsed.append(lambda: lapses.append(None))
    await service.until(lambda: bool(lapses))


async def test_what_is_kept_is_there_when_its_holder_has_died(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await two_of(sharing, worker)
    response = await one.ask("POST", "/v1/responses", json=HI)
    gone = await one.ask("POST", "/v1/responses", json=HI)
    session = await one.ask("POST", "/v2/sessions", 201, json={"model": "fake"})
    await submit(one, session_id=session["session_id"], durable=False)
    await one.until(lambda: not one.orchestrator.live_tasks)
    await one.ask("DELETE", f"/v1/responses/{gone['id']}")
    await copied(one)
    await kill(one, two)

    assert await two.ask("GET", f"/v1/responses/{response['id']}") == response
    await two.ask("GET", f"/v1/responses/{gone['id']}", 404)
    more = HI | {"previous_response_id": response["id"]}
    again = await two.ask("POST", "/v1/responses", json=more)
    assert again["usage"]["input_tokens"] > response["usage"]["input_tokens"]
    assert (await two.ask("GET", f"/v2/sessions/{session['session_id']}"))["turns"] == 1
    status, _ = await submit(two, session_id=session["session_id"], durable=False)
    assert status == 202
    await two.until(lambda: not two.orchestrator.live_tasks)
    assert state_of(two).items.adopted == 2

    # The next one to die leaves all of it to the next.
    await copied(two)
    three = await sharing.member(worker)
    await kill(two, three)
    assert (await three.ask("GET", f"/v2/sessions/{session['session_id']}"))["turns"] == 2
    await three.ask("GET", f"/v1/responses/{response['id']}")


async def test_who_stood_still_lets_go_of_what_another_has_now(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await two_of(sharing, worker)
    held = await one.ask("POST", "/v2/sessions", 201, json={"model": "fake"})
    kept = await one.ask("POST", "/v2/sessions", 201, json={"model": "fake"})
    await copied(one)
    await kill(one, two)
    status, _ = await submit(two, session_id=held["session_id"], durable=False)
    assert status == 202
    await two.until(lambda: not two.orchestrator.live_tasks)
    await thaw(one)
    await copied(one)
    await see_each_other(one, two)
    assert (await one.ask("GET", f"/v2/sessions/{held['session_id']}"))["turns"] == 1
    assert state_of(one).forwarded == 1
    assert (await two.ask("GET", f"/v2/sessions/{kept['session_id']}"))["turns"] == 0
    assert state_of(two).items.adopted == 1


async def test_an_emptied_store_gets_what_is_kept(sharing: Sharing, worker: FakeWorker) -> None:
    one, two = await two_of(sharing, worker)
    response = await one.ask("POST", "/v1/responses", json=HI)
    await copied(one)
    async with sharing.store.client() as client:
        await client.flushall()
        while not await client.keys("*:item:*"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await see_each_other(one, two)
    await kill(one, two)
    await two.ask("GET", f"/v1/responses/{response['id']}")
