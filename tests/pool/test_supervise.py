"""Restarting what died, and giving up when that is pointless (PV-1)."""

import asyncio
import random
from collections import deque

import pytest

from catalog.errors import GaveUp, StartFailed
from pool.supervise import RestartPolicy, supervise

NO_PAUSE = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, max_failures=3, stable_s=30.0)


class Scripted:
    """A unit that serves for the given times, then lives on; ``failing`` starts fail first."""

    name = "triton"
    where = "gRPC on 127.0.0.1:8001"

    def __init__(self, served_s: list[float], failing: int = 0) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self.served_s = deque(served_s)
        self.failing = failing
        self.steady = asyncio.Event()

    async def start(self) -> None:
        self.calls.append("start")
        if self.failing:
            self.failing -= 1
            raise StartFailed("it did not start")

    async def lost(self) -> str:
        if not self.served_s:
            self.steady.set()
            await asyncio.Event().wait()
        self.now += self.served_s.popleft()
        return "it died"

    async def stop(self, drain_s: float) -> None:
        assert drain_s == 0.0, "nothing is left to drain"
        self.calls.append("stop")

    def kill(self) -> None:
        raise AssertionError("a supervisor stops")


async def watch(unit: Scripted, policy: RestartPolicy = NO_PAUSE) -> list[str]:
    """The reasons of every loss until the unit stays up; raises what ``supervise`` raises."""
    reasons: list[str] = []
    supervising = asyncio.create_task(
        supervise(
            unit,
            policy,
            rng=random.Random(1),
            on_lost=lambda reason, pause_s: reasons.append(reason),
            on_ready=lambda seconds: None,
            clock=lambda: unit.now,
        )
    )
    steady = asyncio.create_task(unit.steady.wait())
    await asyncio.wait([supervising, steady], return_when=asyncio.FIRST_COMPLETED)
    steady.cancel()
    if not supervising.done():
        supervising.cancel()
        return reasons
    supervising.result()
    raise AssertionError("supervise returned")


async def test_a_lost_unit_is_cleaned_up_and_started_again() -> None:
    unit = Scripted([100.0, 100.0])
    assert await watch(unit) == ["it died", "it died"]
    assert unit.calls == ["stop", "start", "stop", "start"]


async def test_a_failed_restart_is_tried_again() -> None:
    unit = Scripted([100.0], failing=2)
    assert await watch(unit) == ["it died", "it did not start", "it did not start"]
    assert unit.calls == ["stop", "start"] * 3


async def test_gives_up_after_failures_in_a_row() -> None:
    unit = Scripted([0.1] * 10)
    with pytest.raises(GaveUp, match=r"triton failed 4 times in a row.*at last: it died"):
        await watch(unit)
    assert unit.calls == ["stop", "start"] * 3 + ["stop"]


async def test_serving_for_a_while_forgives() -> None:
    assert len(await watch(Scripted([0.1, 0.1, 31.0, 0.1, 0.1, 31.0]))) == 6


def test_pauses_grow_with_jitter_up_to_a_bound() -> None:
    policy, rng = RestartPolicy(first_delay_s=0.2, max_delay_s=10.0), random.Random(7)
    for failures in range(1, 12):
        ceiling = min(10.0, 0.2 * 2 ** (failures - 1))
        pauses = [policy.delay_s(failures, rng) for _ in range(50)]
        assert all(ceiling / 4 <= pause <= ceiling for pause in pauses)
        assert len(set(pauses)) > 40
