"""The loop that async tests run on: waiting takes its time, a pause of the machine does not."""

import asyncio
import os
import selectors
import sys
import time

import pytest

from tests.support.steady_loop import (
    SLICE_S,
    SteadyClock,
    SteadyLoop,
    SteadySelector,
    hurry,
)


async def test_it_is_what_async_tests_run_on() -> None:
    assert isinstance(asyncio.get_running_loop(), SteadyLoop)


async def test_what_is_waited_for_takes_as_long_as_ever() -> None:
    began, real = asyncio.get_running_loop().time(), time.monotonic()
    await asyncio.sleep(0.1)
    assert asyncio.get_running_loop().time() - began >= 0.09
    assert time.monotonic() - real >= 0.09


async def test_a_process_that_is_stopped_while_it_waits_loses_a_slice_at_most() -> None:
    code = "import os, signal, sys, time; pid = int(sys.argv[1]); time.sleep(0.1)\n"
    code += "os.kill(pid, signal.SIGSTOP); time.sleep(0.5); os.kill(pid, signal.SIGCONT)"
    loop = asyncio.get_running_loop()
    began, real = loop.time(), time.monotonic()
    stopper = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(os.getpid()))
    assert await stopper.wait() == 0
    lost = (time.monotonic() - real) - (loop.time() - began)
    assert lost >= 0.5 - SLICE_S - 0.001


async def test_a_test_has_what_it_waits_for_sooner() -> None:
    real, loop = time.monotonic(), asyncio.get_running_loop()
    hurry(10)
    began = loop.time()
    await asyncio.sleep(3.0)
    assert loop.time() - began >= 2.9
    assert time.monotonic() - real < 2.9


def test_a_wait_is_cut_into_slices_and_counts_for_no_more_than_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = [0.0], []

    def frozen(self: object, timeout: float) -> list[object]:
        asked.append(timeout)
        real[0] += 5.0
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", frozen)
    clock = SteadyClock(lambda: real[0])
    with SteadySelector(clock) as selector:
        assert selector.select(0.025) == []
        assert asked == pytest.approx([SLICE_S, SLICE_S, 0.005])
        assert clock.now() == pytest.approx(0.025)
        assert selector.select(0) == []
        assert asked[3:] == [0] and clock.now() == pytest.approx(0.025)
