"""Time limits of tools: what they have, how they end, and what is left for the run."""

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import tidegate
from tests.client.conftest import FakeTime
from tests.support.fake_orchestrator import FakeOrchestrator, end
from tidegate import Client, ToolTimeout, deadline, remaining, tool_deadline
from tidegate.deadlines import timeout_headers

SOON = 0.01
"""Seconds after which tools that never end are cut."""


async def test_a_tool_has_its_share_of_what_is_left(fake_time: FakeTime) -> None:
    @tool_deadline(5, share=0.5)
    async def tool(takes: float) -> float | None:
        fake_time.seconds += takes
        return remaining()

    assert await tool(1) == 4  # outside of a block its own seconds count
    assert remaining() is None
    with deadline(8):
        assert await tool(1) == 3  # half of 8, less what it took
        assert remaining() == 7  # what it did not use is the run's
        with deadline(100):
            assert await tool(0) == 3.5
    with deadline(20):
        assert await tool(0) == 5


async def test_a_tool_that_takes_too_long_is_cancelled_and_the_run_goes_on() -> None:
    ended = asyncio.Event()

    @tool_deadline(timedelta(seconds=SOON))
    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with deadline(1000):
        with pytest.raises(ToolTimeout, match=r"^hangs did not finish within its 0\.01 s$"):
            await hangs()
        assert ended.is_set()
        with pytest.raises(TimeoutError, match="the block did not finish"):
            async with tool_deadline(share=SOON / 1000):
                await asyncio.Event().wait()
        left = remaining()
        assert left is not None and left > 0


async def test_a_tool_is_not_started_when_nothing_is_left(fake_time: FakeTime) -> None:
    @tool_deadline()
    async def tool() -> None:
        pytest.fail("it was called")

    with deadline(1):
        fake_time.seconds += 1.5
        with pytest.raises(ToolTimeout, match=r"tool was not started: .* 500 ms ago"):
            await tool()


async def test_whatever_of_a_tool_was_too_late_is_one_error_and_its_own_errors_pass(
    fake_time: FakeTime,
) -> None:
    fake = FakeOrchestrator([end(1, 0)])
    async with fake.serve(), Client(fake.base_url) as client:

        @tool_deadline(5)
        async def agent(takes: float) -> None:
            """A sub-agent: its calls state what it has left."""
            await client.generate("a")
            fake_time.seconds += takes
            await client.generate("b")

        @tool_deadline(5)
        async def fails() -> None:
            raise TimeoutError("of its own")

        with deadline(60):
            with pytest.raises(ToolTimeout) as caught:
                await agent(takes=6)
            assert isinstance(caught.value.__cause__, tidegate.DeadlineExceeded)
            with pytest.raises(TimeoutError, match="of its own") as own:
                await fails()
            assert not isinstance(own.value, ToolTimeout)
    assert [body["deadline_ms"] for body in fake.submitted] == [5000]


def test_a_plain_tool_is_left_to_itself_and_sees_that_its_time_is_over() -> None:
    go_on, seen = threading.Event(), list[float | None]()
    done = threading.Event()

    @tool_deadline(SOON)
    def hangs() -> None:
        go_on.wait(60)
        seen.append(remaining())
        done.set()

    with deadline(1000), pytest.raises(ToolTimeout, match="hangs did not finish"):
        hangs()
    go_on.set()
    assert done.wait(60)
    assert seen[0] is not None and seen[0] < 0


def test_a_plain_tool_gives_its_result_or_its_error() -> None:
    @tool_deadline(1000)
    def halve(number: int) -> float:
        """Half of a number."""
        left = remaining()
        assert left is not None and left <= 1000
        if number % 2:
            raise TimeoutError("odd")
        return number / 2

    assert halve(4) == 2
    assert (halve.__name__, halve.__doc__) == ("halve", "Half of a number.")
    with pytest.raises(TimeoutError, match="odd") as own:
        halve(3)
    assert not isinstance(own.value, ToolTimeout)
    assert tool_deadline()(threading.get_ident)() == threading.get_ident()  # no limit, no thread


def test_what_is_no_limit_is_refused() -> None:
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="a tool's time must be"):
            tool_deadline(seconds)
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            tool_deadline(share=share)

    async def yields() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="yields yields its results one by one"):
        tool_deadline(1)(yields)


def test_what_is_left_is_passed_on(fake_time: FakeTime) -> None:
    assert timeout_headers() == {}
    with deadline(2):
        fake_time.seconds += 0.5
        assert timeout_headers() == {"X-Timeout-Ms": "1500"}
