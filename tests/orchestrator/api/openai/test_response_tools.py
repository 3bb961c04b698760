"""Tool calls and reasoning in OpenAI's Responses (OR-3)."""

from __future__ import annotations

from json import dumps
from typing import Any

import pytest

from protocol import FinishReason, Grammar, GrammarKind
from tests.orchestrator.api.openai.test_responses import ask, events_of
from tests.orchestrator.api.tools import ARGUMENTS, CALL, CARD, FUNCTION, SCHEMA, prompt_of, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker
from tests.support.lazy import openai

TOOL: Any = {"type": "function", **FUNCTION, "strict": False}
HI = {"role": "user", "content": "hi"}
ASK: Any = {"model": "fake", "input": "hi", "max_output_tokens": 512, "tools": [TOOL]}


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD)


async def test_an_agents_two_turns_with_the_sdk(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """Called, answered, gone on from: by the items themselves, by id and by reference."""
    worker.plan = lambda submit: says(CALL)
    first = await sdk.responses.create(**ASK)
    (call,) = first.output
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ARGUMENTS)
    assert (call.status, first.status, first.output_text) == ("completed", "completed", "")
    assert first.tools[0].name == "get_weather" and first.tool_choice == "auto"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}

    worker.plan = lambda submit: says("It rains.")
    prompts = []
    for more in (
        {"input": [HI, *first.output, result]},
        {"input": [result], "previous_response_id": first.id},
        {"input": [HI, {"type": "item_reference", "id": call.id}, result]},
    ):
        answer = await sdk.responses.create(**ASK | more)
        assert answer.output_text == "It rains."
        prompts.append(prompt_of(service, worker))
    assert prompts[0] == prompts[1] == prompts[2]
    said = f"</tool_call><|end|><|user|>[get_weather {call.call_id}] rain<|end|><|assistant|>"
    assert '"get_weather", "arguments": {"city"' in prompts[0] and prompts[0].endswith(said)
    with pytest.raises(openai.BadRequestError, match="msg_00") as unknown:
        await sdk.responses.create(
            **ASK | {"input": [{"type": "item_reference", "id": "msg_00"}, result]}
        )
    assert unknown.value.param == "input"


async def test_a_stream_of_all_kinds_of_items(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: says(f"<think>hm, hm</think>Let me see. {CALL}", size=5)
    events = await events_of(service, ASK)
    kinds: list[str] = []
    for event in events:
        kind = event.event.removeprefix("response.")
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    part = "output_item.added content_part.added {0}.delta {0}.done content_part.done"
    assert " ".join(kinds).split(" output_item.done") == [
        f"created in_progress {part.format('reasoning_text')}",
        f" {part.format('output_text')}",
        " output_item.added function_call_arguments.delta function_call_arguments.done",
        " completed",
    ]
    told = [event.json() for event in events]
    last = told[-1]["response"]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    arguments = [e["delta"] for e in told if e["type"].endswith("arguments.delta")]
    assert "".join(arguments) == done[2]["arguments"] == ARGUMENTS and len(arguments) > 1
    assert len({item["id"] for item in done}) == 3
    spent = last["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 2 < spent < last["usage"]["output_tokens"]

    assert (await ask(service, ASK))["usage"] == last["usage"]


async def test_a_call_that_is_cut_is_incomplete(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: says(CALL[:50], reason=FinishReason.LENGTH)
    answer = await ask(service, ASK)
    assert answer["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in answer["output"]] == [
        ("function_call", "incomplete")
    ]
    # nobody could go on from half a call
    await ask(service, ASK | {"input": "so", "previous_response_id": answer["id"]})
    assert '"get_weather", "arguments": {"city"' not in prompt_of(service, worker)


async def test_which_tools_may_be_called(service: Service, worker: FakeWorker) -> None:
    other = TOOL | {"name": "other"}
    asked = ASK | {"tools": [TOOL, other]}
    worker.plan = lambda submit: says("no")
    await ask(service, asked | {"tool_choice": "none"})
    assert "other" not in prompt_of(service, worker)
    for change, word in (
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": "required"}, "cannot be forced"),  # its worker knows no grammars
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "allowed_tools"),
    ):
        error = (await ask(service, asked | change, 400))["error"]
        assert word in error["message"], error
        assert error["param"]


NAMESPACE: Any = {
    "type": "namespace",
    "name": "mcp__git",
    "description": "A server's.",
    "tools": [{"type": "function", "name": "log", "parameters": SCHEMA, "defer_loading": True}],
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
}


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_tools_of_a_namespace_are_called_by_the_names_that_the_client_gave(
    service: Service, worker: FakeWorker
) -> None:
    """As Codex sends the tools of each MCP server."""
    asked = ASK | {"tools": [TOOL, NAMESPACE]}
    worker.plan = lambda submit: says(called("mcp__git__log", city="x") + CALL)
    whole = await ask(service, asked)
    assert "mcp__git__log" in prompt_of(service, worker)
    told = [event.json() for event in await events_of(service, asked)]
    for answer in (whole, told[-1]["response"]):
        own, plain = answer["output"]
        assert (own["type"], own["name"], own["namespace"]) == ("function_call", "log", "mcp__git")
        assert own["arguments"] == '{"city": "x"}' and "namespace" not in plain
    begun = next(e["item"] for e in told if e["type"] == "response.output_item.added")
    assert (begun["name"], begun["namespace"]) == ("log", "mcp__git")
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        for call in whole["output"]
    ]
    worker.plan = lambda submit: says("yes")
    prompts = []
    for more in (
        {"input": [HI, *whole["output"], *results]},
        {"input": results, "previous_response_id": whole["id"]},
    ):
        await ask(service, asked | more)
        prompts.append(prompt_of(service, worker))
    assert prompts[0] == prompts[1] and '"mcp__git__log", "arguments": {"city"' in prompts[0]
    assert "[mcp__git__log call_" in prompts[0]


async def test_a_tool_of_free_text(service: Service, worker: FakeWorker) -> None:
    """As Codex sends apply_patch: the model knows a function with one argument."""
    asked = ASK | {"tools": [PATCH]}
    text = '*** Begin "Patch"\n+é'
    worker.plan = lambda submit: says(called("apply_patch", input=text))
    whole = await ask(service, asked)
    assert "*** Begin" in prompt_of(service, worker)  # the grammar, since nothing else tells it
    told = [event.json() for event in await events_of(service, asked)]
    for answer in (whole, told[-1]["response"]):
        (call,) = answer["output"]
        own = ("custom_tool_call", "apply_patch", text)
        assert (call["type"], call["name"], call["input"]) == own
        assert call["id"].startswith("ctc_") and "arguments" not in call
    parts = [e for e in told if e["type"].startswith("response.custom_tool_call_input")]
    assert [event["type"].rpartition(".")[2] for event in parts] == ["delta", "done"]
    assert parts[0]["delta"] == parts[1]["input"] == text
    assert not any("arguments" in event["type"] for event in told)
    (call,) = whole["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    worker.plan = lambda submit: says("yes")
    prompts = []
    for more in (
        {"input": [HI, call, result]},
        {"input": [result], "previous_response_id": whole["id"]},
    ):
        await ask(service, asked | more)
        prompts.append(prompt_of(service, worker))
    assert prompts[0] == prompts[1]
    assert '"apply_patch", "arguments": {"input"' in prompts[0]
    assert f"[apply_patch {call['call_id']}] ok" in prompts[0]


@for_each(
    ("change", "word"),
    [
        ({"tools": [NAMESPACE, NAMESPACE]}, "two tools named mcp__git__log"),
        (
            {"tools": [NAMESPACE], "tool_choice": {"type": "function", "name": "log"}},
            "no tool of that name",
        ),
        ({"tools": [NAMESPACE | {"name": "a b"}]}, "tools[0].tools[0].name"),
        ({"input": [{"type": "custom_tool_call", "name": "apply_patch"}]}, "input[0].call_id"),
    ],
)
async def test_namespaces_that_cannot_be_served(
    service: Service, change: dict[str, Any], word: str
) -> None:
    assert word in (await ask(service, ASK | change, 400))["error"]["message"]


async def test_the_form_of_the_text(make_worker: MakeWorker, make_service: MakeService) -> None:
    worker = await make_worker(grammars="llguidance")
    service = await make_service(worker)
    plain = {"model": "fake", "input": "hi", "max_output_tokens": 4}
    schema = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    for stated, expected in (
        ({"format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"format": {"type": "text"}, "verbosity": "low"}, None),
    ):
        answer = await ask(service, plain | {"text": stated})
        assert worker.submits[-1].grammar == expected
        assert answer["text"] == stated
    for bad, word in (
        ({"format": {"type": "json_schema", "name": "a"}}, "needs schema"),
        ({"format": {"type": "grammar"}}, "json_schema"),
        ({"format": schema | {"schema": {"type": "none"}}}, "cannot be used"),
        ({"format": schema | {"schema": {"x": "y" * 300_000}}}, "bytes"),
    ):
        error = (await ask(service, plain | {"text": bad}, 400))["error"]
        assert word in error["message"] and error["param"].startswith("text"), error
