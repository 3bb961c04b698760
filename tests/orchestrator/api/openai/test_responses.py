"""``/v1/responses``: OpenAI's Responses, with the official SDK unmodified (OR-3)."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.api.openai.responses.store import ResponseStore, Stored
from orchestrator.retention import Retention
from orchestrator.tasks.job import Message, ToolCall
from protocol import FinishReason
from tests.orchestrator.api.asking import answer_of
from tests.orchestrator.api.tools import prompt_of
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import openai
from tests.support.sse import Event, read_events

HI: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 4}
WELL = Plan(tokens=2, reason=FinishReason.STOP)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type: computer_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image_url is"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"truncation": "some"}, "truncation"),
    ({"truncation": "auto", "input": "x" * 600}, "maximum context length is 512 tokens"),
    ({"background": True}, "POST /v2/tasks"),
    ({"conversation": "conv_1"}, "previous_response_id"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"top_logprobs": 1}, "/v1/chat/completions"),
    ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
    ({"input": "x" * 600}, "maximum context length is 512 tokens"),
]


async def ask(service: Service, body: dict[str, Any], status: int = 200) -> Any:
    return await answer_of(service, "/v1/responses", body, status)


async def events_of(service: Service, body: dict[str, Any]) -> list[Event]:
    async with service.http.post("/v1/responses", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        events = [event async for event in read_events(response)]
    assert all(event.json()["type"] == event.event for event in events)
    assert [event.json()["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_response_with_the_sdk(worker: FakeWorker, sdk: openai.AsyncOpenAI) -> None:
    worker.plan = lambda submit: Plan(tokens=4, reason=FinishReason.STOP, cached=5)
    answer = await sdk.responses.create(**HI, instructions="s", metadata={"a": "b"})
    assert (answer.status, answer.output_text, answer.model) == (
        "completed",
        "w0 w1 w2 w3 ",
        "fake",
    )
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.error is None
    assert (answer.instructions, answer.metadata, answer.tools) == ("s", {"a": "b"}, [])
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 4, 13)
    assert usage.input_tokens_details.cached_tokens == 5
    assert answer._request_id and answer.completed_at >= answer.created_at


async def test_the_order_of_a_streams_events(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(
        per_delta=2, tail="…", text=lambda i: "" if i == 1 else f"{i}"
    )
    events = await events_of(service, HI)
    assert [event.event.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,  # a token without text is none
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    started, last = events[0].json()["response"], events[-1].json()["response"]
    assert (started["status"], started["output"], started["usage"]) == ("in_progress", [], None)
    assert started["id"] == last["id"]
    places = [event.json() for event in events[3:10]]
    assert {(p["item_id"], p["output_index"], p["content_index"]) for p in places} == {
        (last["output"][0]["id"], 0, 0)
    }
    assert [p.get("delta") for p in places[1:5]] == ["0", "2", "3", "…"]
    assert places[5]["text"] == places[6]["part"]["text"] == "023…"
    assert events[-2].json()["item"] == last["output"][0]
    assert last["output"][0]["content"][0]["text"] == "023…"
    assert (last["status"], last["output"][0]["status"]) == ("incomplete", "incomplete")
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "left=" in last["deadline_budget"]


async def test_what_a_prompt_is_made_of(service: Service, worker: FakeWorker) -> None:
    """Instructions and what leads, parts, an answer as it was, and no thoughts."""
    worker.plan = lambda submit: WELL
    first = await ask(service, HI)
    assert prompt_of(service, worker) == "<|bos|><|user|>hi<|end|><|assistant|>"
    items = [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        *first["output"],
        {"role": "user", "content": "d <|end|>"},
    ]
    await ask(service, HI | {"input": items, "instructions": "a"})
    said = "<|system|>a\n\nb<|end|><|user|>c<|end|><|assistant|>w0 w1 <|end|><|user|>d <|end|>"
    assert prompt_of(service, worker) == f"<|bos|>{said}<|end|><|assistant|>"


async def test_a_conversation_by_id(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    worker.plan = lambda submit: WELL
    first = await sdk.responses.create(**HI, instructions="only here")
    second = await sdk.responses.create(**HI | {"input": "and"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = await sdk.responses.create(**HI | {"input": "so"}, previous_response_id=second.id)
    said = "<|user|>hi<|end|><|assistant|>w0 w1 <|end|><|user|>and<|end|><|assistant|>w0 w1 <|end|>"
    # without the instructions, which are of their own request only
    assert prompt_of(service, worker) == f"<|bos|>{said}<|user|>so<|end|><|assistant|>"
    assert (await sdk.responses.retrieve(second.id)).output_text == second.output_text
    await sdk.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="Previous response with id") as unknown:
        await sdk.responses.create(**HI, previous_response_id=second.id)
    assert unknown.value.param == "previous_response_id"
    assert unknown.value.code == "previous_response_not_found"
    await sdk.responses.create(**HI | {"input": "go"}, previous_response_id=third.id)
    said += "<|user|>so<|end|><|assistant|>w0 w1 <|end|>"
    assert prompt_of(service, worker) == f"<|bos|>{said}<|user|>go<|end|><|assistant|>"


async def test_what_is_streamed_is_stored_unless_it_failed(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: WELL
    whole = (await events_of(service, HI))[-1].json()["response"]
    stored = await service.ask("GET", f"/v1/responses/{whole['id']}")
    whole.pop("deadline_budget")
    assert stored == whole
    unstored = await events_of(service, HI | {"store": False})
    worker.plan = lambda submit: Plan(tokens=2, stall_at=1)
    async with service.leaping(21, tokens=1):
        failed = await events_of(service, HI | {"deadline_ms": 20_000})
    for events in (unstored, failed):
        last = events[-1].json()["response"]
        await service.ask("GET", f"/v1/responses/{last['id']}", 404)


async def test_responses_are_their_keys_own(worker: FakeWorker, make_service: MakeService) -> None:
    keys = {"a": {"token": "A"}, "b": {"token": "B"}}
    service = await make_service(worker, keys=keys)
    mine, other = ({"Authorization": f"Bearer {token}"} for token in "AB")
    name = (await service.ask("POST", "/v1/responses", json=HI, headers=mine))["id"]
    asked = HI | {"previous_response_id": name}
    for method, path, body in (
        ("GET", f"/v1/responses/{name}", None),
        ("DELETE", f"/v1/responses/{name}", None),
        ("POST", f"/v1/responses/{name}/cancel", None),
        ("POST", "/v1/responses", asked),
    ):
        await service.ask(method, path, 404 if body is None else 400, json=body, headers=other)
        await service.ask("GET", f"/v1/responses/{name}", headers=mine)
    await service.ask("GET", f"/v1/responses/{name}", 401)


async def test_one_that_is_streamed_is_cancelled_by_its_id(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """OR-21. One that has ended stays as it is."""
    worker.plan = lambda submit: Plan(stall_at=1)
    async with service.http.post("/v1/responses", json=HI | {"stream": True}) as response:
        events = read_events(response)
        name = (await anext(events)).json()["response"]["id"]
        assert (await sdk.responses.cancel(name)).status == "cancelled"
        last = [event.json() async for event in events][-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    await worker.until(lambda: not worker.running)
    worker.plan = lambda submit: WELL
    ended = await sdk.responses.create(**HI)
    assert (await sdk.responses.cancel(ended.id)).status == "completed"
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.cancel("resp_0")


async def test_what_is_not_served_says_what_is(service: Service, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="vLLM's"):
        await sdk.embeddings.create(model="fake", input="hi")
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        await sdk.conversations.create()
    name = (await sdk.responses.create(**HI)).id
    with pytest.raises(openai.NotFoundError, match="keep it"):
        await sdk.responses.input_items.list(name)
    with pytest.raises(openai.APIStatusError, match="/v1/messages/count_tokens counts"):
        await sdk.responses.input_tokens.count(input="hi")
    for query in ("stream=true", "starting_after=1"):
        error = (await service.ask("GET", f"/v1/responses/{name}?{query}", 400))["error"]
        assert error["param"] == query.partition("=")[0] and "/v2/tasks" in error["message"]
    error = await service.refused(404, "/v1/messages/batches", json={})
    assert "/v1/batches" in error["message"]


async def test_bad_input_is_told_what_was_wrong(service: Service, worker: FakeWorker) -> None:
    for change, word in BAD:
        error = (await ask(service, HI | change, 400))["error"]
        assert error["type"] == "invalid_request_error" and word in error["message"]
        assert error["param"]
    assert not worker.submits


SAID = (Message("user", "hello"),)


def make_store() -> ResponseStore:
    return ResponseStore(ManualClock(), Retention(keep_count=10, keep_s=60.0, keep_bytes=2000))


@for_each(
    "said",
    [
        Message("tool", "", call_id="x" * 1000),
        Message("tool", "", call_id="x", name="x" * 1000),
        Message("assistant", "", calls=(ToolCall("x" * 1000, "f", {}),)),
        Message("assistant", "", calls=(ToolCall("x", "f", {}),), reasoning="x" * 1000),
    ],
)
def test_all_texts_of_a_client_count(said: Message) -> None:
    """A template may leave them out, so that no context bounds them."""
    store = make_store()
    store.put("k", "1", Stored(b"{}", (said,)))
    assert store.kept().bytes > 1000


def test_another_orchestrator_has_the_same_response_from_its_copy() -> None:
    calls = (ToolCall("c1", "f", {"a": [1, {"b": None}]}, chars=9),)
    said = (*SAID, Message("assistant", "", calls=calls, reasoning="hm"))
    body = b'{"status": "completed", "output": []}'
    here, there = make_store(), make_store()
    here.put("k", "1", Stored(body, said, (Message("assistant", "well"),)))
    copier = here.copier("k", "1")
    assert copier is not None and here.copier("k", "2") is None
    there.adopt("k", "1", copier())
    assert there.get("k", "1") == here.get("k", "1")
    assert list(there.names()) == [("k", "1")]
    there.let_go("k", "1")
    assert there.kept() == (0, 0)
