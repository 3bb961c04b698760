"""Deadlines of blocks, in async code, in plain code and on the wire."""

from datetime import timedelta

import pytest

import tidegate
from tests.client.conftest import FakeTime
from tests.support.cases import for_each
from tests.support.fake_orchestrator import HANG, FakeOrchestrator, end, sse, token
from tidegate import Client, deadline, remaining, transport
from tidegate.deadlines import to_seconds


def test_nested_blocks_take_the_earlier_and_give_back_what_is_left(fake_time: FakeTime) -> None:
    assert remaining() is None
    with deadline(10) as outer:
        fake_time.seconds += 4
        assert remaining() == outer.remaining() == 6
        with deadline(timedelta(seconds=3)) as inner:
            assert inner.remaining() == 3
        with deadline(60) as longer:
            assert longer.remaining() == 6
            fake_time.seconds += 7
        assert remaining() == -1
    assert remaining() is None


@for_each("seconds", [float("nan"), float("inf")])
def test_only_a_finite_number_is_a_deadline(seconds: float) -> None:
    with pytest.raises(ValueError, match="a finite number, got"):
        deadline(seconds)
    with pytest.raises(ValueError, match="a finite number, got"):
        to_seconds(seconds)


async def test_every_call_states_what_is_left(fake_time: FakeTime) -> None:
    fake = FakeOrchestrator(*[[end(1, 0)]] * 4)
    async with fake.serve(), Client(fake.base_url) as client:
        with deadline(10):
            await client.generate("a")
            fake_time.seconds += 4
            await client.generate("b", deadline=timedelta(seconds=60))
            await client.generate("c", deadline=2500)
            events = client.stream("d")
        async for _ in events:  # its deadline is that of the block it was opened in
            pass
    assert [body.get("deadline_ms") for body in fake.submitted] == [10_000, 6000, 2500, 6000]


async def test_dl24_a_block_that_tells_the_time_is_one_run_of_chats(fake_time: FakeTime) -> None:
    fake = FakeOrchestrator(*[[end(1, 0)]] * 5)
    chat: list[tidegate.Message] = [{"role": "user", "content": "hi"}]
    async with fake.serve(), Client(fake.base_url) as client:
        with client.run(10_000, tools_until=0.3):
            await client.generate(chat)
            with deadline(3):
                await client.generate(chat, wind_down=0.5)
            await client.generate(chat, session_id="own", tell_time=False)
            await client.generate("a plain prompt, which nothing can tell")
        await client.generate(chat)
    told = {"session_id", "tell_time", "wind_down", "tools_until"}
    first, inner, own, *rest = [{k: v for k, v in b.items() if k in told} for b in fake.submitted]
    assert first["session_id"].startswith("run-") and inner == first | {"wind_down": 0.5}
    assert first | {"session_id": ""} == {"session_id": "", "tell_time": True, "tools_until": 0.3}
    assert own == {"session_id": "own", "tell_time": False, "tools_until": 0.3} and rest == [{}, {}]


async def test_a_block_that_is_over_sends_nothing_but_cancels(fake_time: FakeTime) -> None:
    fake = FakeOrchestrator([sse(1, "started", {}), token(2, "a"), HANG])
    async with fake.serve(), Client(fake.base_url) as client:
        with deadline(10):
            async with client.stream("hi") as events:
                async for event in events:
                    if isinstance(event, tidegate.Token):
                        break
                fake_time.seconds += 10.5
                for call in (
                    client.models,
                    lambda: client.submit("no"),
                    lambda: client.status("t1"),
                ):
                    with pytest.raises(tidegate.DeadlineExceeded, match="500 ms ago; nothing"):
                        await call()
                with pytest.raises(TimeoutError):
                    client.events("t1")
    assert len(fake.submitted) == 1
    assert fake.cancelled == ["t1"]


async def test_a_server_that_says_nothing_is_a_missed_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "AFTER_DEADLINE_S", 0.05)
    fake = FakeOrchestrator()
    fake.may_answer.clear()
    async with fake.serve(), Client(fake.base_url) as client:
        with pytest.raises(tidegate.DeadlineExceeded, match="before http://"):
            await client.submit("hi", deadline=timedelta(seconds=-1))
        fake.may_answer.set()
