"""Restarting what died, and giving up when that is pointless (PV-1)."""

import asyncio
import random
from collections import deque

from catalog.errors import StartFailed
from pool.events import EventKind, PoolEvent
from pool.supervise import RestartPolicy, Supervised
from tests.support.fake_pool import simulate

NO_PAUSE = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, max_failures=3, stable_s=30.0)


class Scripted:
    """A unit that serves for the given times, then lives on; ``failing`` restarts fail first."""

    name = "triton"
    where = "gRPC on 127.0.0.1:8001"

    def __init__(self, served_s: list[float], failing: int = 0) -> None:
        self.calls: list[str] = []
        self.served_s = deque(served_s)
        self.failing = failing

    async def start(self) -> None:
        self.calls.append("start")
        if len(self.calls) > 1 and self.failing:
            self.failing -= 1
            raise StartFailed("it did not start")

    async def lost(self) -> str:
        if not self.served_s:
            await asyncio.Event().wait()
        await asyncio.sleep(self.served_s.popleft())
        return "it died"

    async def stop(self, drain_s: float) -> None:
        assert drain_s == 0.0, "nothing is left to drain"
        self.calls.append("stop")

    def kill(self) -> None:
        raise AssertionError("a supervisor stops")


def watch(unit: Scripted) -> tuple[list[str], str]:
    """The reasons of every loss within a day, and why it was given up, if it was."""
    events: list[PoolEvent] = []
    given_up = ""

    async def run() -> None:
        nonlocal given_up
        supervised = Supervised(unit, events.append, random.Random(1), NO_PAUSE)
        supervised.begin()
        try:
            given_up = await asyncio.wait_for(supervised.given_up(), 86_400.0)
        except TimeoutError:
            await supervised.leave()

    simulate(run())
    return [event.text for event in events if event.kind is EventKind.LOST], given_up


def test_a_lost_unit_is_cleaned_up_and_started_again() -> None:
    unit = Scripted([100.0, 100.0])
    assert watch(unit) == (["it died", "it died"], "")
    assert unit.calls == ["start", "stop", "start", "stop", "start"]


def test_a_failed_restart_is_tried_again() -> None:
    unit = Scripted([100.0], failing=2)
    assert watch(unit) == (["it died", "it did not start", "it did not start"], "")
    assert unit.calls == ["start", *["stop", "start"] * 3]


def test_gives_up_after_failures_in_a_row() -> None:
    unit = Scripted([0.1] * 10)
    _, given_up = watch(unit)
    assert given_up == "triton failed 4 times in a row; at last: it died"
    assert unit.calls == [*["start", "stop"] * 4]


def test_serving_for_a_while_forgives() -> None:
    losses, given_up = watch(Scripted([0.1, 0.1, 31.0, 0.1, 0.1, 31.0]))
    assert (len(losses), given_up) == (6, "")


def test_pauses_grow_with_jitter_up_to_a_bound() -> None:
    policy, rng = RestartPolicy(first_delay_s=0.2, max_delay_s=10.0), random.Random(7)
    for failures in range(1, 12):
        ceiling = min(10.0, 0.2 * 2 ** (failures - 1))
        pauses = [policy.delay_s(failures, rng) for _ in range(50)]
        assert all(ceiling / 4 <= pause <= ceiling for pause in pauses)
        assert len(set(pauses)) > 40
