"""What a response was made from, and its events told again (OR-3)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.orchestrator.api.openai.test_response_tools import ASK
from tests.orchestrator.api.openai.test_responses import HI, ask, events_of
from tests.orchestrator.api.tools import CALL, CARD, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service, read_events
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import openai


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD)


async def get(service: Service, path: str, status: int = 200, **headers: str) -> Any:
    async with service.http.get(f"/v1/responses/{path}", headers=headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_input_items_are_those_of_earlier_turns_too(
    worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    worker.plan = lambda submit: says(f"<think>hm</think>Well. {CALL}")
    first = await sdk.responses.create(**ASK, instructions="s")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = await sdk.responses.create(
        **ASK | {"input": [result, {"role": "developer", "content": "c"}]},
        previous_response_id=first.id,
    )
    items = [item async for item in sdk.responses.input_items.list(more.id, order="asc", limit=2)]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output", "message"]
    assert [item.type for item in items] == kinds
    hi, thought, said, called, given, last = items
    assert (hi.role, hi.content[0].type, hi.content[0].text) == ("user", "input_text", "hi")
    assert thought.content[0].text == "hm"
    assert (said.role, said.content[0].type) == ("assistant", "output_text")
    assert (called.name, called.call_id) == ("get_weather", call.call_id)
    assert (given.call_id, given.output, last.content[0].text) == (call.call_id, "rain", "c")
    latest = [item async for item in sdk.responses.input_items.list(more.id)]
    assert [item.id for item in latest] == [item.id for item in reversed(items)]
    assert len({item.id for item in items}) == len(items)


async def test_pages_of_input_items(service: Service, worker: FakeWorker) -> None:
    name = (await ask(service, HI | {"input": [{"role": "user", "content": c} for c in "abc"]}))[
        "id"
    ]
    page = await get(service, f"{name}/input_items?limit=2")
    assert [item["content"][0]["text"] for item in page["data"]] == ["c", "b"]
    ids = [item["id"] for item in page["data"]]
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", *ids)
    rest = await get(service, f"{name}/input_items?after={ids[1]}")
    assert page["has_more"] and not rest["has_more"] and len(rest["data"]) == 1
    for query in ("limit=0", "limit=101", "order=up", "after=msg_1"):
        error = (await get(service, f"{name}/input_items?{query}", 400))["error"]
        assert error["param"] == query.partition("=")[0]
    await get(service, "resp_0/input_items", 404)


async def test_input_items_of_a_response_in_the_making_are_its_keys_own(
    worker: FakeWorker, make_service: MakeService
) -> None:
    plan = Plan(stall_at=1)
    worker.plan = lambda submit: plan
    service = await make_service(worker, keys={"a": {"token": "A"}, "b": {"token": "B"}})
    mine, other = ({"Authorization": f"Bearer {token}"} for token in "AB")
    asked = HI | {"background": True}
    async with service.http.post("/v1/responses", json=asked, headers=mine) as response:
        name = (await response.json())["id"]
    (item,) = (await get(service, f"{name}/input_items", **mine))["data"]
    await get(service, f"{name}/input_items", 404, **other)
    plan.release.set()
    while (await get(service, name, **mine))["status"] == "in_progress":
        pass
    assert (await get(service, f"{name}/input_items", **mine))["data"] == [item]


async def test_a_stream_goes_on_where_it_broke_off(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """With a call that turned out to be text, whose events have numbers as well."""
    text = f"<think>hm, hm</think>Let me see. {CALL}<tool_call>\n{{nonsense</tool_call> or so"
    worker.plan = lambda submit: says(text, size=5)
    live = [event.json() for event in await events_of(service, ASK)]
    last = live[-1]["response"]
    assert [item["type"] for item in last["output"]].count("message") == 2
    texts = {item["id"]: text_of(item) for item in last["output"]}
    for after in range(len(live)):
        told = await sdk.responses.retrieve(last["id"], stream=True, starting_after=after)
        again = [event.to_dict() async for event in told]
        assert all(event["sequence_number"] > after for event in again)
        heard: dict[str, str] = {}
        for event in [*live[: after + 1], *again]:
            if event["type"].endswith(".delta"):
                heard[event["item_id"]] = heard.get(event["item_id"], "") + event["delta"]
        assert {name: heard[name] for name in texts} == texts
        for event in again:
            same = live[event["sequence_number"]]
            assert [event.get(name) for name in SAME] == [same.get(name) for name in SAME]


SAME = ("type", "item", "part", "text", "arguments")
"""Fields of an event told again that are as they were."""


def text_of(item: Any) -> str:
    return str(item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_events_of_what_failed_in_the_background(
    service: Service, worker: FakeWorker
) -> None:
    plan = Plan(stall_at=1, fail_at=2)
    worker.plan = lambda submit: plan
    name = (await ask(service, HI | {"background": True}))["id"]
    await worker.until(lambda: worker.running == 1)
    for query in ("stream=1", "starting_after=1", "stream=true&starting_after=x"):
        await get(service, f"{name}?{query}", 400)
    plan.release.set()
    while (await get(service, name))["status"] == "in_progress":
        pass
    async with service.http.get(f"/v1/responses/{name}?stream=true") as response:
        kinds = [event.event.removeprefix("response.") async for event in read_events(response)]
    begun = ["created", "queued", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*begun, "output_text.delta", "failed"]
    await get(service, "resp_0?stream=true", 404)


async def test_a_response_in_the_background_is_followed_as_it_is_made(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """By several clients at once, from any of its events on."""
    text = f"<think>hm, hm</think>Let me see. {CALL}<tool_call>\n{{nonsense</tool_call> or so"
    whole = says(text, size=5)
    worker.plan = lambda submit: whole
    expected = [event.json() for event in await events_of(service, ASK | {"background": True})]
    assert [event["sequence_number"] for event in expected] == list(range(len(expected)))
    kinds = [event["type"].removeprefix("response.") for event in expected]
    assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
    assert [event["response"]["status"] for event in expected[:3]] == [
        *("queued", "queued", "in_progress")
    ]
    assert whole.tokens is not None
    afters = range(0, len(expected), 2)
    for stall_at in range(1, whole.tokens, 11):
        plan = replace(whole, stall_at=stall_at, release=asyncio.Event())
        worker.plan = lambda submit, plan=plan: plan
        made = await sdk.responses.create(**ASK, background=True)
        await worker.until(lambda: worker.running == 1)
        followers = [
            await sdk.responses.retrieve(made.id, stream=True, starting_after=after)
            for after in afters
        ]
        plan.release.set()
        for after, follower in zip(afters, followers, strict=True):
            told = [event.to_dict() async for event in follower]
            numbers = [event["sequence_number"] for event in told]
            assert numbers == sorted(set(numbers)) and all(number > after for number in numbers)
            for event in told:
                same = expected[event["sequence_number"]]
                assert event["type"] == same["type"]
                for field in ("text", "arguments"):
                    assert event.get(field) == same.get(field)
            for kind, field in (("message", "output_text"), ("reasoning", "reasoning_text")):
                if after < 3:
                    deltas = [e["delta"] for e in told if e["type"] == f"response.{field}.delta"]
                    assert text_in(told[-1]["response"], kind) in "".join(deltas)
        assert (await sdk.responses.retrieve(made.id)).status == "completed"


def text_in(response: Any, kind: str) -> str:
    return "".join(
        item["content"][0]["text"] for item in response["output"] if item["type"] == kind
    )


async def test_a_hang_up_does_not_end_a_response_in_the_background(
    service: Service, worker: FakeWorker
) -> None:
    """Its client comes back, and goes on after the last event that it has."""
    plan = Plan(stall_at=2)
    worker.plan = lambda submit: plan
    asked = HI | {"background": True, "stream": True}
    told: list[Any] = []
    async with service.http.post("/v1/responses", json=asked) as response:
        assert response.headers["X-Deadline-Source"] == "default"
        async for event in read_events(response):
            told.append(event.json())
            if told[-1]["type"].endswith(".delta"):
                break
        response.close()
    name, last = told[0]["response"]["id"], told[-1]["sequence_number"]
    assert (await get(service, name))["status"] == "in_progress"
    path = f"/v1/responses/{name}?stream=true&starting_after={last}"
    async with service.http.get(path) as response:
        plan.release.set()
        more = [event.json() async for event in read_events(response)]
    texts = [one["delta"] for one in [*told, *more] if one["type"].endswith(".delta")]
    assert "".join(texts) == "w0 w1 w2 w3 "
    assert more[0]["sequence_number"] == last + 1
    assert more[-1]["type"] == "response.incomplete" and more[-1]["response"]["deadline_budget"]
    assert (await get(service, name))["status"] == "incomplete"
    assert service.outcomes() == ["met"]


async def test_followers_of_what_waits_hear_of_its_end(
    service: Service, worker: FakeWorker
) -> None:
    """Here that it was cancelled, before it had begun."""
    begin = asyncio.Event()
    worker.plan = lambda submit: Plan(begin=begin)
    name = (await ask(service, HI | {"background": True}))["id"]
    async with service.http.get(f"/v1/responses/{name}?stream=true") as response:
        events = read_events(response)
        first = [(await anext(events)).event for _ in range(2)]
        assert first == ["response.created", "response.queued"]
        async with service.http.post(f"/v1/responses/{name}/cancel") as answer:
            assert (await answer.json())["status"] == "cancelled"
        rest = [event.json() async for event in events]
    assert [one["type"] for one in rest] == ["response.in_progress", "response.failed"]
    assert rest[-1]["response"]["status"] == "cancelled"
    async with service.http.get(f"/v1/responses/{name}?stream=true") as response:
        again = [event.json()["sequence_number"] async for event in read_events(response)]
    assert again == [0, 1, 2, 3]


async def test_who_comes_late_to_a_long_text_is_not_taken_for_slow(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """What has happened may be larger than what may wait for a client beside it."""
    service = await make_service(worker, CLIENT_BUFFER_BYTES=100_000)
    plan = Plan(tokens=40, stall_at=20, text=lambda at: f"{at:02}" + "x" * 10_000)
    worker.plan = lambda submit: plan
    name = (await ask(service, HI | {"background": True, "max_output_tokens": 40}))["id"]
    while len((await get(service, name))["output"]) == 0:
        pass
    path = f"/v1/responses/{name}?stream=true"
    async with service.http.get(path, read_bufsize=2**22) as response:
        plan.release.set()
        events = [event.json() async for event in read_events(response)]
    text = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert [text[at : at + 2] for at in range(0, len(text), 10_002)] == [
        f"{at:02}" for at in range(40)
    ]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
