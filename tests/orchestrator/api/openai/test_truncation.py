"""``truncation: auto``: what a prompt leaves out of a conversation that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.api.openai.responses.truncation import cut, cuts_of, truncated
from orchestrator.tasks.job import Message
from orchestrator.tasks.tools import ToolCall
from tests.orchestrator.api.openai.asking import answer_of
from tests.orchestrator.api.openai.test_responses import HI, prompt_of
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker

ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def history_of(kinds: str) -> tuple[Message, ...]:
    """Turns by their letters: a ``c`` calls a tool, a ``t`` is the result of the latest call."""
    turns: list[Message] = []
    call = ""
    for at, kind in enumerate(kinds):
        call = str(at) if kind == "c" else call
        calls = (ToolCall(call, "f", {}),) if kind == "c" else ()
        call_id = call if kind == "t" else ""
        turns.append(Message(ROLES[kind], kind, calls=calls, call_id=call_id))
    return tuple(turns)


@pytest.mark.parametrize(
    ("kinds", "left"),
    [
        ("u", []),
        ("suauau", ["suauau", "suau", "su"]),
        ("auau", ["uau", "u"]),
        ("suasuau", ["suasuau", "ssuau", "ssu"]),  # instructions in the middle stay
        ("uctauct", ["uct"]),  # of the last step the call stays with its result
        ("uauctcttca", ["uctcttca", "ucttca", "uca", "ua"]),
        ("ucutu", ["u"]),  # a result that came late keeps its call
        ("uuauu", ["uu"]),
        ("ctct", ["ct"]),  # nothing of the user's
    ],
)
def test_what_may_be_left_out(kinds: str, left: list[str]) -> None:
    history = history_of(kinds)
    found = [cut(history, place) for place in cuts_of(history)]
    assert ["".join(turn.content for turn in turns) for turns in found] == left
    for turns in found:
        calls = {call.id for turn in turns for call in turn.calls}
        assert {turn.call_id for turn in turns if turn.call_id} <= calls


async def test_no_more_is_left_out_than_must_be() -> None:
    history, asked = history_of("s" + "ua" * 500 + "u"), []

    async def fits(turns: tuple[Message, ...], most: int) -> bool:
        asked.append(len(turns))
        return len(turns) <= most

    for most in (1, 2, 3, 4, 777, 1001, 1002):
        asked.clear()
        kept = await truncated(history, lambda turns, most=most: fits(turns, most))
        assert len(kept) == max(2, most if most % 2 == 0 else most - 1)
        assert len(asked) <= 11


async def test_a_long_conversation_is_cut_to_the_context(
    service: Service, worker: FakeWorker
) -> None:
    """The context holds 512 tokens, and what is said a token a byte."""
    items = [{"role": "developer", "content": "s"}]
    for at in range(10):
        items += [{"role": "user", "content": f"{at}" + "x" * 99}]
        items += [{"role": "assistant", "content": "y"}]
    asked: dict[str, Any] = HI | {"input": [*items, {"role": "user", "content": "last"}]}
    auto = asked | {"truncation": "auto"}
    answer = await answer_of(service, "/v1/responses", auto)
    prompt = prompt_of(service, worker)
    assert prompt.startswith("<|bos|><|system|>s<|end|><|user|>6x") and "last" in prompt
    assert answer["truncation"] == "auto"
    counted = await answer_of(service, "/v1/responses/input_tokens", auto)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] <= 508
    # What may be generated needs room, too.
    await answer_of(service, "/v1/responses", auto | {"max_output_tokens": 200})
    assert "<|user|>8x" in prompt_of(service, worker).partition("<|end|>")[2][:12]
    whole = auto | {"input": "more", "previous_response_id": answer["id"]}
    assert (await answer_of(service, "/v1/responses", whole))["usage"]["input_tokens"] <= 508
    path = f"/v1/responses/{answer['id']}/input_items?limit=100"
    async with service.http.get(path) as response:
        assert len((await response.json())["data"]) == len(asked["input"])
    for refused in (asked, auto | {"input": "x" * 600}):
        error = (await answer_of(service, "/v1/responses", refused, 400))["error"]
        assert error["code"] == "context_length_exceeded"
    assert service.outcomes() == [*["met"] * 3, *["refused"] * 2]
