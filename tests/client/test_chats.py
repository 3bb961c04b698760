"""Chats in OpenAI's shape: tools, reasoning, deadlines, retries."""

from datetime import timedelta
from typing import Any

import pytest

import tidegate
from protocol import Code
from tests.client.conftest import FakeTime
from tests.orchestrator.api.tools import ARGUMENTS, CALL, CARD, SCHEMA, says
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cutting_proxy import cutting_proxy, losing_answers
from tests.support.fake_worker import FakeWorker, Plan
from tidegate import Client, ToolCall, deadline

TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD)


async def test_tools_and_reasoning(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: says(f"<think>Rain?</think>Let me see.\n{CALL}")
    async with Client(service.url) as client:
        answer = await client.chat("fake", HI, tools=TOOLS, max_completion_tokens=500)
        (call,) = answer.tool_calls
        assert (answer.text, answer.finish_reason) == ("Let me see.", "tool_calls")
        assert answer.reasoning.strip() == "Rain?"
        assert call == ToolCall(call.id, "get_weather", ARGUMENTS)
        assert answer.usage is not None and answer.usage.completion_tokens > 10
        async with client.chat_stream("fake", HI, tools=TOOLS, max_completion_tokens=500) as stream:
            deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas).strip() == "Let me see."
    assert "".join(delta.reasoning for delta in deltas).strip() == "Rain?"
    pieces = [call for delta in deltas for call in delta.tool_calls]
    assert [piece.name for piece in pieces if piece.name] == ["get_weather"]
    assert "".join(piece.arguments for piece in pieces) == ARGUMENTS
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["tool_calls"]
    assert deltas[-1].usage == answer.usage


async def test_deadlines_reach_the_worker(service: Service, worker: FakeWorker) -> None:
    async with Client(service.url) as client:
        with deadline(90):
            await client.chat("fake", HI, max_completion_tokens=2)
            more = {"seed": 7, "deadline_ms": 80_000, "first_token": timedelta(seconds=30)}
            stated: tidegate.ChatOptions = {"deadline": 40_000, "extra_body": more}
            await client.chat("fake", HI, max_completion_tokens=2, **stated)
    first, second = worker.submits
    assert 40_000 < first.budget_ms <= 90_000
    assert second.budget_ms <= 40_000
    assert second.sampling.seed == 7
    assert second.first_token_budget_ms is not None and second.first_token_budget_ms <= 30_000


async def test_a_refusal_is_retried_and_a_lost_answer_is_not(
    worker: FakeWorker, make_service: MakeService, fake_time: FakeTime
) -> None:
    service = await make_service(worker, token="secret")
    async with Client(service.url, token="wrong") as client:
        with pytest.raises(tidegate.AuthFailed):
            await client.chat("fake", HI)
        with pytest.raises(tidegate.AuthFailed):
            await anext(client.chat_stream("fake", HI))
    async with (
        losing_answers(service.url, b"200", times=1) as url,
        Client(url, token="secret") as client,
    ):
        with pytest.raises(tidegate.ConnectFailed):
            await client.chat("fake", HI, max_completion_tokens=2)
    assert (len(worker.submits), fake_time.pauses) == (1, [])


async def test_no_instance_is_waited_for(
    worker: FakeWorker, service: Service, fake_time: FakeTime
) -> None:
    """503 with a pause that the server asks for; nothing has run."""
    service.orchestrator.registry.cordon(worker.address)
    async with Client(service.url) as client:
        with pytest.raises(tidegate.Unavailable):
            await anext(client.chat_stream("fake", HI))
        assert fake_time.pauses == [1, 1, 1]
        with deadline(1.5), pytest.raises(tidegate.Unavailable):
            await client.chat("fake", HI)
    assert fake_time.pauses == [1, 1, 1, 1]
    assert worker.submits == []


async def test_what_breaks_on_the_way(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(fail_at=2)
    async with Client(service.url) as client:
        with pytest.raises(tidegate.ApiError) as failed:
            async for _ in client.chat_stream("fake", HI):
                pass
        assert failed.value.code == Code.ENGINE_ERROR
    worker.plan = lambda submit: Plan(step_s=0.001)
    async with cutting_proxy(service.url, 1, after_bytes=600) as url, Client(url) as client:
        with pytest.raises(tidegate.ConnectFailed, match="ended early"):
            async for _ in client.chat_stream("fake", HI):
                pass
