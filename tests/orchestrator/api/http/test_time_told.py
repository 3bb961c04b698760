"""DL-24: what is left of the time, told to the model."""

import asyncio
from typing import Any

import pytest

from orchestrator.prompts.time_left import with_time_left
from orchestrator.tasks.job import Chat, Message
from tests.orchestrator.api.asking import TEXT
from tests.orchestrator.api.tools import CARD, SCHEMA, prompt_of, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.orchestrator.tasks.test_runs import Bench
from tests.support.fake_worker import FakeWorker

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "And then?"}],
    "max_tokens": 4,
    "tools": [TOOL],
    "deadline_ms": 45_000,
}
LEFT = "And then?\n\n[About 30 seconds are left for this task.]<|end|><|assistant|>"
LAST = LEFT.replace("task.", "task: give your final answer now, with what you have.")


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    worker = await make_worker(**CARD)
    worker.plan = lambda submit: says("ok")
    return worker


async def test_the_last_turn_tells_it(service: Service, worker: FakeWorker) -> None:
    """So that what is cached of the turns before it holds; near the end the model is to finish."""
    for told, end, has_tools in (
        ({}, "And then?<|end|><|assistant|>", True),
        ({"tell_time": True}, LEFT, True),
        ({"tell_time": False, "wind_down": 1}, "And then?<|end|><|assistant|>", True),
        ({"wind_down": 1}, LAST, True),
        ({"tools_until": 1}, LEFT, False),
    ):
        await service.ask("POST", PATH, json=ASK | told)
        prompt = prompt_of(service, worker)
        assert prompt.endswith(f"<|user|>{end}") and ("look" in prompt) is has_tools, told


async def test_the_share_is_of_the_whole_runs_time(service: Service, worker: FakeWorker) -> None:
    told = {"session_id": "run", "wind_down": 0.95}
    await service.ask("POST", PATH, json=ASK | told | {"deadline_ms": 2000})
    await asyncio.sleep(0.2)
    await service.ask("POST", PATH, json=ASK | told | {"deadline_ms": 1800})
    assert "final answer" in prompt_of(service, worker)


async def test_every_dialect_says_it(service: Service, worker: FakeWorker) -> None:
    told: dict[str, Any] = {"model": "fake", "deadline_ms": 45_000, "tell_time": True}
    chat = told | {"messages": ASK["messages"], "max_tokens": 4}
    words = told | {"input": "And then?"}
    asked = {"/v1/messages": chat, "/v1/responses": words, "/v2/tasks": chat}
    for count, (path, body) in enumerate(asked.items(), 1):
        await service.ask("POST", path, 200, 202, json=body)
        await worker.until(lambda known=count: len(worker.submits) == known)  # type: ignore[misc]
        assert prompt_of(service, worker).endswith(LEFT)


async def test_what_is_no_share_or_no_chat_is_refused_and_a_key_may_have_it_by_default(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, keys={"agent": {"token": "a", "tell_time": True}})
    own = {"Authorization": "Bearer a"}
    for more, field in (({"wind_down": 1.5}, "wind_down"), ({"tools_until": -1}, "tools_until")):
        answer = await service.ask("POST", PATH, 400, json=ASK | more, headers=own)
        assert answer["error"]["param"] == field
    told = TEXT | {"tell_time": True}
    answer = await service.ask("POST", "/v1/completions", 400, json=told, headers=own)
    assert answer["error"]["param"] == "tell_time"
    await service.ask("POST", "/v1/completions", json=TEXT, headers=own)
    await service.ask("POST", PATH, json=ASK, headers=own)
    assert prompt_of(service, worker).endswith(LEFT)


def test_steps_are_coarse_and_the_share_is_of_the_whole_run() -> None:
    bench = Bench()
    turns = (Message("system", "Be brief."), Message("user", "hi"), Message("tool", "x"))

    def said(left_s: float, turns: tuple[Message, ...] = turns) -> str:
        told = with_time_left(turns, job, left_s)
        assert isinstance(told, Chat) and told.messages[:-1] == turns[:-1]
        return told.messages[-1].content

    bench.call(due_s=100, tells=True, arrived=bench.clock.now())
    bench.clock.advance(60)
    job = bench.call(due_s=40, tells=True, arrived=bench.clock.now()).job
    for left_s, words in (
        (0.4, "Less than a second is left"),
        (1.9, "About 1 second is left"),
        (39, "About 30 seconds are left"),
        (59.9, "About 30 seconds are left"),
        (90, "About 1 minute is left"),
        (1e6, "About 30 minutes are left"),
    ):
        assert words in said(left_s)
    assert "final answer" in said(19) and "final answer" not in said(21)
    mine = (Message("user", "hi"), Message("assistant", "ho", is_open=True))
    assert said(5, mine) == "ho", "the model's own words are left alone"
