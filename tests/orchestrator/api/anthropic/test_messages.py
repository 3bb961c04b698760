"""``/v1/messages``: Anthropic's shapes, with the official SDK unmodified (OR-3)."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import Code, FinishReason, block_hashes, prefix_salt
from tests.orchestrator.api.asking import CHAT as HI
from tests.orchestrator.api.tools import prompt_of
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import anthropic
from tests.support.sse import Event, read_events


async def answer_of(service: Service, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer: dict[str, Any] = await service.ask("POST", "/v1/messages", json=body, headers=headers)
    return answer


async def error_of(
    service: Service, body: object, path: str = "/v1/messages", **headers: str
) -> tuple[int, dict[str, Any]]:
    async with service.http.post(path, json=body, headers=headers) as response:
        answer = await response.json()
        assert answer["type"] == "error"
        assert answer["request_id"] == response.headers["request-id"]
        error: dict[str, Any] = answer["error"]
        return response.status, error


async def events_of(service: Service, body: dict[str, Any]) -> list[Event]:
    async with service.http.post("/v1/messages", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        events = [event async for event in read_events(response)]
    assert all(event.json()["type"] == event.event for event in events)
    return events


async def test_a_message_with_the_sdk(worker: FakeWorker, claude: anthropic.AsyncAnthropic) -> None:
    worker.plan = lambda submit: Plan(cached=5)
    message = await claude.messages.create(**HI)
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [(block.type, block.text) for block in message.content] == [("text", "w0 w1 w2 w3 ")]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (1, 4)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 0)
    assert message._request_id


async def test_no_more_is_cached_than_the_prompt_has(service: Service, worker: FakeWorker) -> None:
    """What continues elsewhere has its own text in its prompt there, which may be cached too."""
    worker.plan = lambda submit: Plan(cached=9)
    usage = (await answer_of(service, HI))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 6)


async def test_the_order_of_a_streams_events(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(
        per_delta=2, tail="…", text=lambda i: "" if i == 1 else f"{i}"
    )
    events = await events_of(service, HI)
    assert [event.event for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * 4,  # a token without text is none
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0].json()["message"]
    assert start["id"].startswith("msg_") and start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == 6
    texts = [e.json()["delta"]["text"] for e in events if e.event == "content_block_delta"]
    assert texts == ["0", "2", "3", "…"]
    last = events[-2].json()
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 4
    assert "left=" in last["deadline_budget"]


async def test_a_stream_begins_with_the_token_counts_that_it_ends_with(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """What the worker found in its cache, whatever it had told of it before."""
    long = HI | {"messages": [{"role": "user", "content": "x" * 100}]}
    await events_of(await make_service(worker), long)
    worker.cached = block_hashes(worker.submits[-1].token_ids, 16, prefix_salt(b"", ""))
    service = await make_service(worker)
    await service.until(lambda: bool(service.orchestrator.registry.prefixes))
    for cached in (96, 16, 0):
        worker.plan = lambda submit, cached=cached: Plan(cached=cached)  # type: ignore[misc]
        events = await events_of(service, long)
        first, last = events[0].json()["message"]["usage"], events[-2].json()["usage"]
        names = ("input_tokens", "cache_read_input_tokens")
        assert [first[name] for name in names] == [last[name] for name in names]
        assert first["cache_read_input_tokens"] == cached < first["input_tokens"] + cached


async def test_a_stop_sequence_is_named(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(stop="END", reason=FinishReason.STOP)
    body = HI | {"stop_sequences": ["x", "END"]}
    answer = await answer_of(service, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert worker.submits[0].sampling.stop == ("x", "END")
    last = (await events_of(service, body))[-2].json()
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


async def test_what_a_prompt_is_made_of(service: Service, worker: FakeWorker) -> None:
    """System text, blocks, turns that follow each other, and an assistant's last one."""
    text = lambda *texts: [{"type": "text", "text": t} for t in texts]  # noqa: E731
    body = HI | {
        "system": [*text("be "), {"type": "text", "text": "brief", "cache_control": {}}],
        "messages": [
            {"role": "user", "content": text("a", "b")},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": "e"},
        ],
    }
    await answer_of(service, body)
    said = "<|bos|><|system|>be brief<|end|><|user|>ab\n\nc<|end|><|assistant|>d<|end|><|user|>e"
    assert prompt_of(service, worker) == f"{said}<|end|><|assistant|>"
    body["messages"].append({"role": "assistant", "content": "Once <|end|> upon"})
    await answer_of(service, body | {"system": ""})
    said = said.replace("<|system|>be brief<|end|>", "")
    assert prompt_of(service, worker) == f"{said}<|end|><|assistant|>Once <|end|> upon"
    body["messages"][-1]["content"] = "Once "
    status, error = await error_of(service, body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "whitespace" in error["message"]


async def test_tokens_are_counted_as_they_are_computed(
    service: Service, worker: FakeWorker, claude: anthropic.AsyncAnthropic
) -> None:
    asked = {key: HI[key] for key in ("model", "messages")} | {"system": "s"}
    counted = await claude.messages.count_tokens(**asked)
    message = await claude.messages.create(**HI, system="s")
    assert counted.input_tokens == message.usage.input_tokens == 9
    long = {"role": "user", "content": "x" * 4000}
    status, error = await error_of(
        service, {"model": "fake", "messages": [long]}, "/v1/messages/count_tokens"
    )
    assert (status, error["type"]) == (400, "invalid_request_error")
    # Claude Code shortens by these figures: /prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)/
    figures = f"prompt is too long: {error['prompt_tokens']} tokens > 512 maximum; "
    assert error["message"].startswith(figures)
    assert len(worker.submits) == 1


@for_each(
    ("change", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "assistant, system, user"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, kind)
            for kind in ("image", "document", "tool_use", "tool_result")
        ),
    ],
)
async def test_bad_input_is_told_what_was_wrong(
    service: Service, worker: FakeWorker, change: dict[str, Any], word: str
) -> None:
    status, error = await error_of(service, HI | change)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert word in error["message"]
    assert not worker.submits


async def test_errors_are_anthropics(
    service: Service, worker: FakeWorker, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(**HI | {"model": "none"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    status, error = await error_of(service, {}, "/v1/messages/none")
    assert (status, error["type"]) == (404, "not_found_error")
    worker.plan = lambda submit: Plan(fail_at=0)
    status, error = await error_of(service, HI)
    assert (status, error["type"], error["code"]) == (502, "api_error", "engine_error")
    status, error = await error_of(service, HI | {"deadline_ms": 0.001})
    assert (status, error["type"], error["code"]) == (504, "timeout_error", "deadline_exceeded")
    error = await service.refused(415, "/v1/messages", data=b"{" * 2)
    assert error["type"] == "invalid_request_error"


async def test_overload_is_529_and_tried_again(
    service: Service, worker: FakeWorker, claude: anthropic.AsyncAnthropic
) -> None:
    full = worker.does(Plan(refuse=(Code.QUEUE_FULL, "full")))
    status, error = await error_of(service, HI)
    assert (status, error["type"]) == (529, "overloaded_error")

    def refused() -> float:
        return service.metric("tidegate_http_errors_total", status="529", code="queue_full")

    assert refused() == 1
    worker.plan = lambda submit: Plan() if refused() > 1 else full
    assert (await claude.messages.create(**HI)).stop_reason == "max_tokens"
    assert refused() == 2


async def test_a_thread_that_was_never_kept_is_refused_so_that_all_of_it_is_sent(
    service: Service,
) -> None:
    """Without the refusal the answer would be to the last message alone. The code is the one by
    which Claude Code sends the whole conversation, then and later."""
    goes_on = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = HI | goes_on if path == "/v1/messages" else {"messages": HI["messages"]} | goes_on
        status, error = await error_of(service, body, path)
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request"}
    begins = await answer_of(service, HI | {"thread": {"type": "create"}})
    assert begins["type"] == "message"
