"""Sessions through both clients and the command, before a real orchestrator."""

import asyncio
from typing import Any

import pytest

import tidegate
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan
from tidegate import Client, SyncClient


@pytest.fixture(autouse=True)
def brief(worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(tokens=2)


async def test_a_turn_sends_only_what_is_new(service: Service, worker: FakeWorker) -> None:
    begin: list[tidegate.Message] = [{"role": "system", "content": "Briefly."}]
    async with Client(service.url) as client:
        async with client.sessions.open(begin, idle_keep_s=5) as session:
            answer = await session.generate("one")
            async with session.stream("two", max_tokens=9) as events:
                assert [type(event) async for event in events][-1] is tidegate.End
            info = await session.info()
            listed = await client.sessions.list()
        assert [each.session_id for each in listed.sessions] == [session.id]
        with pytest.raises(LookupError):
            await session.info()
    assert (info.turns, info.status, info.idle_keep_s) == (2, "idle", 5)
    assert [message["role"] for message in info.messages] == ["system", *["user", "assistant"] * 2]
    assert info.messages[2]["content"] == answer.text
    assert len(worker.submits[1].token_ids) > len(worker.submits[0].token_ids)


@pytest.mark.parametrize(("begin", "turn"), [("Once ", "more "), ([2, 3, 4], [5])])
async def test_other_kinds_of_sessions(service: Service, begin: Any, turn: Any) -> None:
    async with Client(service.url) as client:
        session = await client.sessions.create(begin)
        await session.generate(turn)
        info = await session.info()
        await client.sessions.delete(session.id)
    said = info.prompt or list(info.prompt_token_ids)
    assert said[: len(begin + turn)] == begin + turn


async def test_in_plain_code(service: Service) -> None:
    def work() -> None:
        with SyncClient(service.url) as client:
            with client.sessions.open() as session:
                session.generate("one")
                assert isinstance(list(session.stream("two"))[-1], tidegate.End)
                assert session.info().turns == 2
                assert [one.session_id for one in client.sessions.list().sessions] == [session.id]
            assert client.sessions.list().sessions == ()

    await asyncio.to_thread(work)
