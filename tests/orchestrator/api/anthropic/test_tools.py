"""Tool calls and thinking in Anthropic's messages (OR-3)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.orchestrator.api.anthropic.test_messages import answer_of, error_of, events_of
from tests.orchestrator.api.asking import CHAT as HI
from tests.orchestrator.api.tools import ARGUMENTS, CALL, CARD, SCHEMA, prompt_of, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker
from tests.support.lazy import anthropic

TOOL: Any = {"name": "get_weather", "description": "Now.", "input_schema": SCHEMA}
ASK: Any = HI | {"max_tokens": 512, "tools": [TOOL]}


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD)


async def test_calls_with_the_sdk(worker: FakeWorker, claude: anthropic.AsyncAnthropic) -> None:
    worker.plan = lambda submit: says(f"<think>Hm.</think>\nLet me see.\n{CALL}")
    message = await claude.messages.create(**ASK)
    async with claude.messages.stream(**ASK) as stream:
        streamed = await stream.get_final_message()
    for answer in (message, streamed):
        thought, text, call = answer.content
        assert thought.type == "thinking" and thought.thinking == "Hm."
        assert text.type == "text" and text.text == "Let me see."
        assert call.type == "tool_use" and call.id.startswith("toolu_")
        assert (call.name, call.input) == ("get_weather", json.loads(ARGUMENTS))
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


async def test_the_order_of_a_streams_events(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: says(f"<think>Hm.</think>Well.\n{CALL}\n{CALL}", size=40)
    events = [event.json() for event in await events_of(service, ASK)]
    told = [
        event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        for event in events
    ]
    call = ["content_block_start", *["input_json_delta"] * 3, "content_block_stop"]
    assert told == [
        *("message_start", "content_block_start", "ping", "thinking_delta", "signature_delta"),
        *("content_block_stop", "content_block_start", "text_delta", "content_block_stop"),
        *call[:2],
        *[kind for kind in told[11:] if kind in call or kind.startswith("message")],
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    kinds = [event["content_block"]["type"] for event in starts]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2]["content_block"]["input"] == {}
    for index in (2, 3):
        inside = [event for event in events if event.get("index") == index]
        assert [event["type"] for event in (inside[0], inside[-1])] == [call[0], call[-1]]
        fragments = [event["delta"]["partial_json"] for event in inside[1:-1]]
        assert fragments[0] == "" and len(fragments) > 2 and "".join(fragments) == ARGUMENTS
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and told[-1] == "message_stop"


async def test_the_choice_of_a_tool(make_worker: MakeWorker, make_service: MakeService) -> None:
    worker = await make_worker(**CARD | {"grammars": "llguidance"})
    service = await make_service(worker)
    worker.plan = lambda submit: says(f"{CALL}\n{CALL}")
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        await answer_of(service, ASK | {"tool_choice": choice})
        grammar = worker.submits[-1].grammar
        assert grammar is not None and "get_weather" in grammar.text
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await answer_of(service, ASK | {"tool_choice": one}))["content"]) == 1
    assert worker.submits[-1].grammar is None
    (text,) = (await answer_of(service, ASK | {"tool_choice": {"type": "none"}}))["content"]
    assert text["type"] == "text" and "get_weather" not in prompt_of(service, worker)


async def test_text_of_a_stated_form(make_worker: MakeWorker, make_service: MakeService) -> None:
    worker = await make_worker(grammars="llguidance")
    service = await make_service(worker)
    form = {"type": "json_schema", "schema": SCHEMA}
    for stated in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        await answer_of(service, HI | stated)
        grammar = worker.submits[-1].grammar
        assert grammar is not None and json.loads(grammar.text) == SCHEMA and grammar.lenient
    for wrong, word in (
        ({"output_format": {"type": "xml"}}, "output_format: type 'xml'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "needs schema"),
    ):
        status, error = await error_of(service, HI | wrong)
        assert status == 400 and word in error["message"], error


async def test_thinking_is_told_to_the_template(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    template = CARD["chat_template"].replace("thinks", "enable_thinking")
    worker = await make_worker(**CARD | {"chat_template": template})
    service = await make_service(worker)
    worker.plan = lambda submit: says("Hm.</think>Yes.")
    body = HI | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    thought, text = (await answer_of(service, body))["content"]
    assert (thought["thinking"], text["text"]) == ("Hm.", "Yes.")
    (text,) = (await answer_of(service, HI | {"thinking": {"type": "disabled"}}))["content"]
    assert text["text"] == "Hm.</think>Yes."


USED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
USER: Any = {"role": "user", "content": "x"}


def turn(role: str, **block: object) -> dict[str, Any]:
    return {"role": role, "content": [block]}


@for_each(
    ("change", "word"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "grammars"),
        ({"messages": [USER, turn("assistant", type="tool_use")]}, "needs id and name"),
        ({"messages": [USER, turn("assistant", **USED)]}, "tool_result"),
        ({"messages": [turn("assistant", type="tool_result"), USER]}, "is the user's"),
    ],
)
async def test_what_is_wrong_with_tools_is_told(
    service: Service, worker: FakeWorker, change: dict[str, Any], word: str
) -> None:
    status, error = await error_of(service, ASK | change)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert word in error["message"], error
    assert not worker.submits
