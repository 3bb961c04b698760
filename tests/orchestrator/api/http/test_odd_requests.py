"""Kinds of requests that clients really send beyond the letter of an API: what each is answered.

Of each the change to a plain request, then what its answer names as passed over (``""``: nothing),
or a part of the refusal.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from orchestrator.api.http.ignored import IGNORED_HEADER
from tests.orchestrator.api.http.test_tolerant_reader import (
    BODIES,
    CHAT,
    COUNT,
    HI,
    MESSAGES,
    RESPONSES,
    TEXT,
    sent,
)
from tests.orchestrator.api.tools import CARD, SCHEMA, prompt_of, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker
from tests.support.sse import read_events

RECORDED = Path(__file__).parents[1] / "recorded"


class Refused(NamedTuple):
    """With this in the message."""

    why: str
    status: int = 400


ANY: dict[str, Any] = {"type": "ephemeral"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
OWN = {"name": "f", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


def said(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]}


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(arguments: object, **more: object) -> dict[str, Any]:
    """A chat in which the model has called ``f``."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    return said(HI, assistant(None, tool_calls=[call], **more), result)


def used(block: dict[str, Any], **more: object) -> dict[str, Any]:
    """The same as Anthropic's blocks."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x", **more}
    return said(HI, assistant([block]), user([result]))


def item(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [HI, *items]}


ODD: list[tuple[str, dict[str, Any], str | Refused]] = [
    # settings of other servers and SDKs
    (CHAT, {"provider": {"order": ["x"]}, "transforms": []}, "provider, transforms"),
    (CHAT, {"num_ctx": 4096, "options": {"num_predict": 4}}, "num_ctx, options"),
    (
        CHAT,
        {"stream_options": {"include_obfuscation": True, "x": 1}, "stream": True},
        "stream_options.x",
    ),
    (CHAT, {"metadata": {"a": 1}, "store": True, "user": "u", "service_tier": "auto"}, ""),
    (TEXT, {"chat_template_kwargs": {"enable_thinking": False}}, ""),
    (RESPONSES, {"client_metadata": {"a": "b"}, "prompt_cache_key": "k"}, "client_metadata"),
    (RESPONSES, {"chat_template_kwargs": {"thinks": False}}, ""),
    (RESPONSES, {"text": {"verbosity": "low", "tone": "x"}}, "text.tone"),
    (MESSAGES, {"chat_template_kwargs": {"thinks": False}, "stop": ["x"]}, "stop"),
    (MESSAGES, {"metadata": {"user_id": 5, "team": "t"}}, ""),
    (CHAT, {"length_penalty": 2, "early_stopping": True}, "length_penalty, early_stopping"),
    # null, and numbers in strings
    (CHAT, dict.fromkeys(("temperature", "top_p", "stop", "n", "tools", "seed", "logit_bias")), ""),
    (CHAT, {"temperature": "0.5", "max_tokens": "4", "top_k": "3", "seed": 1.0}, ""),
    # which model
    (CHAT, {"model": ""}, ""),
    (MESSAGES, {"model": None}, ""),
    # what is meant is clear
    (CHAT, {"max_completion_tokens": 5}, "max_tokens"),
    (RESPONSES, {"max_tokens": 5}, "max_tokens"),
    # histories
    (CHAT, called("{"), ""),
    (CHAT, called("{}", reasoning_content="hm"), ""),
    (CHAT, called("{}", reasoning_details=[{"type": "x"}]), "messages[].reasoning_details"),
    (CHAT, said(HI, {"role": "system", "content": "be brief"}, HI), ""),
    (CHAT, said(user(["a", {"type": "text", "text": "b", "cache_control": ANY}])), ""),
    (CHAT, said(HI, assistant([{"type": "thinking", "thinking": "hm"}]), HI), ""),
    (
        CHAT,
        said(
            HI,
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "x"},
        ),
        "",
    ),
    (CHAT, said(user([{"type": "text", "text": "a", "x": 1}])), "messages[].content[].x"),
    (MESSAGES, said(HI, {"role": "system", "content": "be brief"}), ""),
    (MESSAGES, used({"type": "tool_use", "id": "1", "name": "f", "input": "{"}), ""),
    (MESSAGES, used({"type": "tool_use", "id": "1", "name": "f", "input": {}}, content=None), ""),
    (RESPONSES, item({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}), ""),
    *(
        (RESPONSES, item({"type": kind, "call_id": None, "arguments": {}}), f"input[].type={kind}")
        for kind in ("mcp_call", "code_interpreter_call", "tool_search_call", "web_search_call")
    ),
    *(
        (RESPONSES, item({"type": kind, "output": {"x": 1}}), Refused(f"{kind} is not supported"))
        for kind in ("computer_call_output", "shell_call_output", "compaction")
    ),
    (RESPONSES, item({"id": "msg_1"}), Refused("'msg_1' is not kept here")),
    *(
        (MESSAGES, used({"type": kind, "content": {}}), f"messages[].content[].type={kind}")
        for kind in ("server_tool_use", "web_search_tool_result", "mcp_tool_use")
    ),
    (MESSAGES, said(user([CALL | {"type": "fallback"}])), Refused("empty")),
    (MESSAGES, used({"type": "container_upload"}), Refused("content[0].type: container_upload")),
    (
        MESSAGES,
        used(
            CALL,
            content=[{"type": "tool_reference", "tool_name": "f"}, {"type": "text", "text": ""}],
        ),
        "messages[].content[].type=tool_reference",
    ),
    (RESPONSES, item({"type": "reasoning", "summary": [], "encrypted_content": None}), ""),
    (RESPONSES, item({"role": "developer", "content": "x"}, user("y") | {"z": 1}), "input[].z"),
    # tools
    (CHAT, {"tools": [TOOL | {"cache_control": ANY}]}, ""),
    (CHAT, {"tools": [TOOL | {"x": 1}]}, "tools[].x"),
    (CHAT, {"tools": [{"function": TOOL["function"]}]}, ""),
    (CHAT, {"tools": [TOOL, {"type": "web_search"}]}, "tools[].type=web_search"),
    (MESSAGES, {"tools": [OWN | {"cache_control": ANY, "eager_input_streaming": True}]}, ""),
    (
        MESSAGES,
        {"tools": [OWN, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
        "tools[].max_uses, tools[].type=web_search_20250305",
    ),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "https://x.example"}]}, "mcp_servers"),
    # hints
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, ""),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"truncation": "auto"}, ""),  # as agents send
    # another answer
    (CHAT, said({"role": "user", "contents": "x"}), Refused("messages[0].content is required")),
    (CHAT, {"modalities": ["text", "audio"]}, Refused("modalities")),
    (CHAT, {"use_beam_search": True}, Refused("use_beam_search")),
    (CHAT, {"echo": True}, Refused("echo")),
    *((TEXT, {name: "a+"}, Refused(name)) for name in ("regex", "ebnf", "grammar", "json_schema")),
    (CHAT, {"structured_outputs": {"jsonn": {}}}, Refused("exactly one of")),
    (TEXT, {"prompt_embeds": "AA=="}, Refused("prompt_embeds")),
    (RESPONSES, {"previous_response_id": "resp_1"}, Refused("Previous response with id 'resp_1'")),
    (MESSAGES, {"thinking": {"type": "sometimes"}}, Refused("thinking.type")),
    (MESSAGES, {"response_format": {"type": "json_object"}}, Refused("send output_config.format")),
    (RESPONSES, {"structured_outputs": {"json": {}}}, Refused("send text.format")),
]


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    card = CARD | {"grammars": "llguidance", "block_tokens": 1024}
    return await make_worker(**card)


@for_each(("path", "change", "expected"), ODD)
async def test_odd_requests(
    service: Service, path: str, change: dict[str, Any], expected: str | Refused
) -> None:
    body = BODIES[path] | change
    if body.get("stream"):
        async with service.http.post(path, json=body) as response:
            assert (response.status, response.headers[IGNORED_HEADER]) == (200, expected)
            return
    status, told, answer = await sent(service, path, body)
    if isinstance(expected, Refused):
        assert status == expected.status and expected.why in answer, answer
    else:
        assert status == 200, answer
        assert sorted(told.split(", ")) == sorted(expected.split(", "))


async def test_broken_arguments_are_shown_as_they_were_written(
    service: Service, worker: FakeWorker
) -> None:
    deep = '{"a":' + "[" * 70 + "]" * 70 + "}"
    for arguments, shown in (
        ('{"city": "Ko', '"INVALID_JSON": "{\\"city\\": \\"Ko"'),
        ("[1]", '"INVALID_JSON": "[1]"'),
        (deep, '"INVALID_JSON": '),
        ('{"city": "x"}', '"city": "x"'),
        ({"city": "x"}, '"city": "x"'),
    ):
        status, _, answer = await sent(service, CHAT, BODIES[CHAT] | called(arguments))
        assert status == 200, answer
        assert f'<tool_call>{{"name": "f", "arguments": {{{shown}' in prompt_of(service, worker)


async def test_a_max_tokens_that_must_be_stated_is_cut(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: says("Done.", size=8)
    status, told, _ = await sent(service, MESSAGES, BODIES[MESSAGES] | {"max_tokens": 64_000})
    assert (status, told) == (200, "")
    submit = worker.submits[-1]
    assert submit.sampling.max_tokens == 8192 - len(submit.token_ids)
    status, _, message = await sent(service, CHAT, BODIES[CHAT] | {"max_tokens": 64_000})
    assert status == 400 and "maximum context length is 8192" in message


async def test_a_model_that_is_left_out_or_has_an_alias(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    aliases = {"gpt-4o": "fake", "claude-*": "fake", "o*": "other"}
    one, other = await make_worker(), await make_worker(model="other")
    service = await make_service(one, other, models__aliases=aliases)
    await service.until(lambda: len(service.orchestrator.models.by_name()) == 2)
    for path in (CHAT, MESSAGES, RESPONSES, COUNT, TEXT):
        body = {name: value for name, value in BODIES[path].items() if name != "model"}
        status, _, message = await sent(service, path, body)
        assert status == 400 and "name one: fake, other" in message
        for model, served in (
            ("gpt-4o", "fake"),
            ("claude-opus-4-8", "fake"),
            ("o3", "other"),
            ("other", "other"),
        ):
            status, _, answer = await sent(service, path, body | {"model": model})
            assert status == 200, answer
            assert answer.get("model", served) == served
        status, _, message = await sent(service, path, body | {"model": "gpt-4"})
        assert status == 404 and "'gpt-4' is not served" in message
    listed = {one["id"]: one["root"] for one in (await service.ask("GET", "/v1/models"))["data"]}
    assert listed == {"fake": "fake", "other": "other", "gpt-4o": "fake"}
    assert (await service.ask("GET", "/v1/models/claude-x"))["root"] == "fake"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
async def test_what_agents_send_is_answered(
    make_worker: MakeWorker, make_service: MakeService, name: str
) -> None:
    """The first request, and one with what their tools said, as ``make test-clients RECORD=1``
    keeps them: without long texts and most of the tools."""
    recorded = json.loads(await asyncio.to_thread((RECORDED / f"{name}.json").read_text))
    card = CARD | {"grammars": "llguidance", "context_tokens": 65_536, "block_tokens": 1024}
    worker = await make_worker(**card)
    service = await make_service(worker, models__aliases=dict.fromkeys(NAMES, "fake"))
    worker.plan = lambda submit: says("Done.", size=8)
    for asked in recorded["requests"]:
        async with service.http.request(
            asked["method"], asked["path"], json=asked.get("body"), headers=asked["headers"]
        ) as response:
            assert response.status == 200, await response.text()
            if asked["method"] == "HEAD":
                continue
            told = response.headers.get(IGNORED_HEADER, "")
            events = [event async for event in read_events(response)]
        assert told == EXPECTED[recorded["client"]]
        assert events[-1].event in ENDS or events[-1].data == "[DONE]"
        assert "Done." in "".join(event.data for event in events)
    assert any(task in prompt_of(service, worker) for task in TASKS)


NAMES = ("claude-*", "gpt-*", "scripted")
ENDS = ("message_stop", "response.completed")
TASKS = ("Read a.py", "Make the colour in settings.ini blue")
EXPECTED = {
    "aider": "",
    "claude-code": "",
    "opencode": "",
    "qwen": "",
    "codex": "client_metadata, tools[].external_web_access, tools[].type=web_search",
}
