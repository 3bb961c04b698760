"""What is promised of every dialect alike (OR-3): texts, deadlines, errors, calls and thinking,
whole and streamed. What only one of them has is in its own folder."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from protocol import FinishReason, GrammarKind
from tests.orchestrator.api.tools import ARGUMENTS, CALL, CARD, SCHEMA, prompt_of, says
from tests.orchestrator.conftest import MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import read_events

FUNCTION = {"name": "get_weather", "description": "Now."}
HELLO = [{"role": "user", "content": "hi"}]
LIMIT = 512


class Said(NamedTuple):
    """What an answer says, in whatever shape."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments."""
    reason: str = ""


def of_chat(answer: Any) -> Said:
    (choice,) = answer["choices"]
    said = choice.get("message", {})
    calls = [call["function"] for call in said.get("tool_calls", ())]
    return Said(
        said.get("content") or choice.get("text", ""),
        said.get("reasoning_content", ""),
        tuple((call["name"], call["arguments"]) for call in calls),
        choice["finish_reason"],
    )


def of_chunks(chunks: list[Any]) -> Said:
    text = thinking = reason = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            said = choice.get("delta", {})
            text += said.get("content") or choice.get("text", "")
            thinking += said.get("reasoning_content", "")
            reason = choice["finish_reason"] or reason
            for call in said.get("tool_calls", ()):
                own = calls.setdefault(call["index"], ["", ""])
                own[0] += call["function"].get("name", "")
                own[1] += call["function"]["arguments"]
    return Said(text, thinking, tuple((name, args) for name, args in calls.values()), reason)


def of_items(answer: Any) -> Said:
    by_type = {kind: [one for one in answer["output"] if one["type"] == kind] for kind in ITEMS}
    texts, thoughts, calls = by_type.values()
    return Said(
        "".join(one["content"][0]["text"] for one in texts),
        "".join(one["content"][0]["text"] for one in thoughts),
        tuple((one["name"], one["arguments"]) for one in calls),
        (answer["incomplete_details"] or {}).get("reason", answer["status"]),
    )


ITEMS = ("message", "reasoning", "function_call")


def of_blocks(answer: Any) -> Said:
    blocks = answer["content"]
    calls = [one for one in blocks if one["type"] == "tool_use"]
    return Said(
        "".join(one.get("text", "") for one in blocks),
        "".join(one.get("thinking", "") for one in blocks),
        tuple((one["name"], json.dumps(one["input"], ensure_ascii=False)) for one in calls),
        answer["stop_reason"],
    )


def of_block_events(events: list[Any]) -> Said:
    text = thinking = reason = ""
    calls: dict[int, list[str]] = {}
    for event in events:
        delta, block = event.get("delta", {}), event.get("content_block", {})
        text += delta.get("text", "")
        thinking += delta.get("thinking", "")
        reason = delta.get("stop_reason") or reason
        if block.get("type") == "tool_use":
            calls[event["index"]] = [block["name"], ""]
        if "partial_json" in delta:
            calls[event["index"]][1] += delta["partial_json"]
    return Said(text, thinking, tuple((name, args) for name, args in calls.values()), reason)


class Dialect(NamedTuple):
    path: str
    body: dict[str, Any]
    reasons: tuple[str, str, str]
    """Why an answer ended by itself, by its limit, and with calls."""
    whole: Callable[[Any], Said]
    streamed: Callable[[list[Any]], Said]
    tool: dict[str, Any]
    turns: dict[str, Any]
    """An earlier call with its result, in a conversation."""
    form: dict[str, Any]
    """Asks for an answer of ``SCHEMA``."""

    async def ask(self, service: Service, status: int = 200, **more: Any) -> Any:
        body = {"model": "fake", **self.body, **more}
        return await service.ask("POST", self.path, status, json=body)

    async def events(self, service: Service, **more: Any) -> list[Any]:
        body = {"model": "fake", **self.body, **more, "stream": True}
        async with service.http.post(self.path, json=body) as response:
            assert response.status == 200, await response.text()
            return [e.json() async for e in read_events(response) if e.data != "[DONE]"]

    async def both(self, service: Service, **more: Any) -> Said:
        """What is said, whole and streamed alike."""
        said = self.whole(await self.ask(service, **more))
        assert self.streamed(await self.events(service, **more)) == said
        return said


_NAMED = {"name": "get_weather"}
_FORM = {"type": "json_schema", "name": "f", "schema": SCHEMA}
_BONN = '{"city": "Bonn"}'
CHAT = Dialect(
    "/v1/chat/completions",
    {"messages": HELLO, "max_tokens": LIMIT},
    ("stop", "length", "tool_calls"),
    of_chat,
    of_chunks,
    {"type": "function", "function": FUNCTION | {"parameters": SCHEMA}},
    {
        "messages": [
            {"role": "user", "content": "Where?"},
            {
                "role": "assistant",
                "content": "So:",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c1", "function": _NAMED | {"arguments": _BONN}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Rain."}]},
            {"role": "user", "content": "And?"},
        ]
    },
    {"response_format": {"type": "json_schema", "json_schema": _FORM}},
)
COMPLETION = Dialect(
    "/v1/completions",
    {"prompt": "hi", "max_tokens": LIMIT},
    ("stop", "length", ""),
    of_chat,
    of_chunks,
    {},
    {},
    {},
)
RESPONSES = Dialect(
    "/v1/responses",
    {"input": "hi", "max_output_tokens": LIMIT},
    ("completed", "max_output_tokens", "completed"),
    of_items,
    lambda events: of_items(events[-1]["response"]),
    {"type": "function", **FUNCTION, "parameters": SCHEMA},
    {
        "input": [
            {"role": "user", "content": "Where?"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": "So:"},
            {"type": "function_call", "name": "get_weather", "call_id": "c1", "arguments": _BONN},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
            {"role": "user", "content": "And?"},
        ]
    },
    {"text": {"format": _FORM}},
)
MESSAGES = Dialect(
    "/v1/messages",
    {"messages": HELLO, "max_tokens": LIMIT},
    ("end_turn", "max_tokens", "tool_use"),
    of_blocks,
    of_block_events,
    FUNCTION | {"input_schema": SCHEMA},
    {
        "messages": [
            {"role": "user", "content": "Where?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "So:"},
                    {"type": "tool_use", **_NAMED, "id": "c1", "input": {"city": "Bonn"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And?"},
                    {"type": "tool_result", "tool_use_id": "c1", "content": "Rain."},
                ],
            },
        ]
    },
    {"output_config": {"format": _FORM}},
)
ALL = (CHAT, COMPLETION, RESPONSES, MESSAGES)
WITH_TOOLS = (CHAT, RESPONSES, MESSAGES)


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD | {"grammars": "llguidance"})


@for_each("dialect", ALL)
async def test_a_text_and_its_end(service: Service, worker: FakeWorker, dialect: Dialect) -> None:
    """DL-9 too. Tokens without text and text that was held back are in it."""
    stop, length, _ = dialect.reasons
    worker.plan = lambda submit: Plan(
        tokens=4, per_delta=2, tail="…", text=lambda i: "" if i == 1 else f"{i}"
    )
    assert await dialect.both(service) == Said("023…", reason=length)
    worker.plan = lambda submit: Plan(tokens=1, text=lambda i: "", reason=FinishReason.STOP)
    assert await dialect.both(service) == Said(reason=stop)
    body = {"model": "fake", **dialect.body}
    async with service.http.post(dialect.path, json=body) as response:
        parts = [part.split("=")[0] for part in response.headers["X-Deadline-Budget"].split(";")]
    assert parts == ["queue", "route", "prefill", "decode", "left"]
    assert "left=" in json.dumps((await dialect.events(service))[-2:])


@pytest.mark.parametrize("dialect", ALL, ids=[one.path for one in ALL])  # a breaker opens
async def test_dl5_errors_before_and_after_the_first_byte(
    service: Service, worker: FakeWorker, dialect: Dialect
) -> None:
    """DL-5: a status, then the last event."""
    worker.plan = lambda submit: Plan(fail_at=0)
    for stream in (False, True):
        error = (await dialect.ask(service, 502, stream=stream))["error"]
        assert error["code"] == "engine_error"
    worker.plan = lambda submit: Plan(fail_at=2)
    last = (await dialect.events(service))[-1]
    assert last.get("response", last)["error"]["code"] == "engine_error"
    worker.plan = lambda submit: Plan(stall_at=2)
    async with service.leaping(21, tokens=2):
        last = (await dialect.events(service, deadline_ms=20_000))[-1]
    assert last.get("response", last)["error"]["code"] == "deadline_exceeded"
    assert service.outcomes()[-4:] == ["failed"] * 3 + ["missed"]


@for_each("dialect", ALL)
async def test_dl6_what_there_is_at_the_deadline(
    service: Service, worker: FakeWorker, dialect: Dialect
) -> None:
    """DL-6: with a reason of our own."""
    worker.plan = lambda submit: Plan(stall_at=2)
    async with service.leaping(21, tokens=2):
        answer = await dialect.ask(service, deadline_ms=20_000, on_deadline="partial")
    assert dialect.whole(answer) == Said("w0 w1 ", reason="deadline")
    usage = answer["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 2
    assert service.outcomes()[-1] == "partial"


@for_each("dialect", WITH_TOOLS)
async def test_thinking_text_and_calls(
    service: Service, worker: FakeWorker, dialect: Dialect
) -> None:
    stop, length, calls = dialect.reasons
    tools = {"tools": [dialect.tool]}
    called = ("get_weather", ARGUMENTS)
    worker.plan = lambda submit: says(f"<think>Hm.</think>\nLet me see.\n{CALL}\n{CALL}")
    assert await dialect.both(service, **tools) == Said("Let me see.", "Hm.", (called,) * 2, calls)
    # What only begins like a call is text, though a stream has told of it by then.
    broken = CALL.replace('"Köln"', "?")
    worker.plan = lambda submit: says(broken)
    assert dialect.whole(await dialect.ask(service, **tools)) == Said(broken, reason=stop)
    said = dialect.streamed(await dialect.events(service, **tools))
    assert (said.text, said.reason) == (broken, stop)
    # A call that a limit cuts is one all the same.
    worker.plan = lambda submit: says(CALL[:65], reason=FinishReason.LENGTH)
    said = dialect.whole(await dialect.ask(service, **tools))
    ((name, arguments),) = said.calls
    assert (name, said.text, said.reason) == ("get_weather", "", length)
    assert arguments.startswith('{"city": "K')
    said = dialect.streamed(await dialect.events(service, **tools))
    assert ARGUMENTS.startswith(said.calls[0][1]) and said.reason == length


@for_each("dialect", WITH_TOOLS)
async def test_earlier_calls_and_their_results(
    service: Service, worker: FakeWorker, dialect: Dialect
) -> None:
    """What a model thought, said and called in one go is one turn of the chat."""
    worker.plan = lambda submit: says("Yes.")
    await dialect.ask(service, **dialect.turns, tools=[dialect.tool])
    prompt = prompt_of(service, worker)
    assert '"name": "get_weather", "description": "Now.", "parameters": {"type"' in prompt
    assert prompt.endswith(
        "<|user|>Where?<|end|><|assistant|><think>Hm.</think>So:"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call><|end|>'
        "<|user|>[get_weather c1] Rain.<|end|><|user|>And?<|end|><|assistant|>"
    )


@for_each("dialect", WITH_TOOLS)
async def test_a_form_is_that_of_the_answer_behind_the_thinking(
    service: Service, worker: FakeWorker, dialect: Dialect
) -> None:
    form = '{"city":"Köln"}'
    for before, said, thought, thinks in (
        ("before: thought", f"Hm.\n</think>\n\n{form}", "Hm.", {"thinks": True}),
        ('before: ("<think>" thought', f"<think>Hm.</think>{form}", "Hm.", {}),
        ('before: ("<think>" thought', form, "", {}),
        ("", form, "", {"thinks": False}),  # the prompt has ended it
    ):
        worker.plan = lambda submit, said=said: says(said)  # type: ignore[misc]
        told = await dialect.ask(service, **dialect.form, chat_template_kwargs=thinks)
        grammar = worker.submits[-1].grammar
        assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
        assert before in grammar.before and bool(before) is bool(grammar.before)
        answer = dialect.whole(told)
        assert (answer.thinking, answer.text) == (thought, form)
