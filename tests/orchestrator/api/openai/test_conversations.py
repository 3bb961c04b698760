"""``/v1/conversations``, with the official SDK unmodified (OR-3)."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.api.openai.responses.conversation_store import Conversation, ConversationStore
from orchestrator.api.openai.responses.kept_items import KeptItem
from orchestrator.errors import InvalidRequest, NotFound
from orchestrator.retention import Retention
from protocol import FinishReason
from tests.orchestrator.api.openai.asking import answer_of
from tests.orchestrator.api.openai.test_response_tools import ASK
from tests.orchestrator.api.openai.test_responses import HI, events_of, prompt_of
from tests.orchestrator.api.tools import CALL, CARD, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import openai

AT = "/v1/conversations"
WELL = Plan(tokens=2, reason=FinishReason.STOP)


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD)


async def test_responses_read_a_conversation_and_add_to_it(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """Equal to the same turns by ``previous_response_id``, with a tool's call and result."""
    held = await sdk.conversations.create(items=[{"role": "developer", "content": "s"}])
    prompts: dict[str, list[str]] = {"conversation": [], "previous_response_id": []}
    for way, said in prompts.items():
        more: dict[str, Any] = {}
        if way == "conversation":
            more["conversation"] = held.id
        worker.plan = lambda submit: says(f"<think>hm</think>Well. {CALL}")
        first = await sdk.responses.create(**ASK, **more)
        said.append(prompt_of(service, worker))
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        worker.plan = lambda submit: says("It rains.")
        more[way] = held.id if way == "conversation" else first.id
        answer = await sdk.responses.create(**ASK | {"input": [result]}, **more)
        said.append(prompt_of(service, worker).replace(call.call_id, "ID"))
        if way == "conversation":
            assert answer.conversation.id == held.id
            items = [item async for item in sdk.conversations.items.list(held.id, order="asc")]
            own = [item.id for item in (*first.output, *answer.output)]
            assert [item.id for item in items if item.id in own] == own
            listed = await sdk.responses.input_items.list(answer.id, limit=1)
            assert listed.data[0].id == items[-2].id
    leading = "<|system|>s<|end|>"
    in_held, by_id = prompts["conversation"], prompts["previous_response_id"]
    assert [leading in prompt for prompt in in_held] == [True, True]
    assert [prompt.replace(leading, "") for prompt in in_held] == by_id
    kinds = "message message reasoning message function_call function_call_output message"
    assert [item.type for item in items] == kinds.split()


async def test_a_conversations_life_with_the_sdk(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    held = await sdk.conversations.create(metadata={"a": "b"})
    assert held.id.startswith("conv_") and held.metadata == {"a": "b"}
    assert (await sdk.conversations.update(held.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await sdk.conversations.retrieve(held.id)).created_at == held.created_at
    made = await sdk.conversations.items.create(
        held.id, items=[{"role": "user", "content": text} for text in "ab"]
    )
    first, second = made.data
    assert (first.role, first.content[0].text, made.has_more) == ("user", "a", False)
    latest = await sdk.conversations.items.list(held.id, limit=1)
    assert [item.id for item in latest.data] == [second.id]
    assert await sdk.conversations.items.retrieve(first.id, conversation_id=held.id) == first
    assert (await sdk.conversations.items.delete(first.id, conversation_id=held.id)).id == held.id
    assert [item.id async for item in sdk.conversations.items.list(held.id)] == [second.id]
    assert (await sdk.conversations.delete(held.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.conversations.retrieve(held.id)


async def test_what_ends_well_is_added_stored_or_not_and_no_more(
    service: Service, worker: FakeWorker
) -> None:
    held = (await answer_of(service, AT, {}))["id"]
    asked = HI | {"conversation": {"id": held}, "store": False}

    async def count() -> int:
        async with service.http.get(f"{AT}/{held}/items") as response:
            return len((await response.json())["data"])

    worker.plan = lambda submit: Plan(fail_at=1)
    await events_of(service, asked)
    assert await count() == 0
    worker.plan = lambda submit: WELL
    await events_of(service, asked)
    assert await count() == 2
    cut = f"Well. {CALL[:-30]}"
    worker.plan = lambda submit: says(cut, reason=FinishReason.LENGTH)
    await events_of(service, ASK | {"conversation": held})
    assert await count() == 4  # without the call that was cut, which no model could read
    worker.plan = lambda submit: WELL
    await answer_of(service, "/v1/responses", asked)


async def test_conversations_are_their_keys_own(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, keys={"a": {"token": "A"}, "b": {"token": "B"}})
    mine, other = ({"Authorization": f"Bearer {token}"} for token in "AB")
    body: dict[str, Any] = {"items": [{"role": "user", "content": "a"}]}
    async with service.http.post(AT, json=body, headers=mine) as response:
        held = (await response.json())["id"]
    async with service.http.get(f"{AT}/{held}/items", headers=mine) as response:
        item = (await response.json())["first_id"]
    for method, path, sent in (
        ("GET", f"{AT}/{held}", None),
        ("POST", f"{AT}/{held}", {"metadata": {}}),
        ("GET", f"{AT}/{held}/items", None),
        ("POST", f"{AT}/{held}/items", body),
        ("GET", f"{AT}/{held}/items/{item}", None),
        ("DELETE", f"{AT}/{held}/items/{item}", None),
        ("DELETE", f"{AT}/{held}", None),
    ):
        async with service.http.request(method, path, json=sent, headers=other) as response:
            assert response.status == 404, (method, path)
    asked = HI | {"conversation": held}
    async with service.http.post("/v1/responses", json=asked, headers=other) as response:
        assert response.status == 404
        assert (await response.json())["error"]["param"] == "conversation"
    async with service.http.get(f"{AT}/{held}/items/{item}", headers=mine) as response:
        assert response.status == 200


async def test_bad_input_is_told_what_was_wrong(service: Service, worker: FakeWorker) -> None:
    held = (await answer_of(service, AT, {}))["id"]
    user = {"role": "user", "content": "a"}
    bad: list[tuple[str, dict[str, Any], str]] = [
        (AT, {"metadata": {"a": 1}}, "metadata"),
        (AT, {"items": [{"type": "computer_call"}]}, "items[0].type"),
        (f"{AT}/{held}/items", {"items": [user] * 21}, "items"),
        (f"{AT}/{held}/items", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items"),
        (f"{AT}/{held}/items", {"items": [user, {"type": "function_call"}]}, "items[1].call_id"),
        (
            "/v1/responses",
            HI | {"conversation": held, "previous_response_id": "resp_1"},
            "previous_response_id",
        ),
    ]
    for path, body, field in bad:
        assert (await answer_of(service, path, body, 400))["error"]["param"] == field
    for query in ("limit=0", "limit=101", "order=up", "after=msg_1"):
        async with service.http.get(f"{AT}/{held}/items?{query}") as response:
            assert response.status == 400
    assert not worker.submits


def test_conversations_are_bounded() -> None:
    clock = ManualClock()
    store = ConversationStore(clock, Retention(keep_count=2, keep_s=60.0, keep_bytes=4000))
    held, *_ = some = [Conversation(0, {}) for _ in range(2)]
    for each in some:
        store.create("k", each)
    clock.advance(40.0)
    store.get("k", held.id)  # a use
    clock.advance(40.0)
    with pytest.raises(NotFound):
        store.get("k", some[1].id)
    large = KeptItem("msg_1", "message", "x" * 4000, "user")
    with pytest.raises(InvalidRequest, match="4000 bytes"):
        store.add("k", held.id, [large])
    assert not store.get("k", held.id).items
    store.answered("k", held.id, [large])
    with pytest.raises(NotFound):
        store.get("k", held.id)
    with pytest.raises(InvalidRequest, match="is 0"):
        ConversationStore(clock, Retention(keep_count=0, keep_s=1, keep_bytes=1)).create("k", held)
