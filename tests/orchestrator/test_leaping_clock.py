"""The clock of the orchestrators under test: it runs, leaps, and stands still."""

import asyncio

from tests.support.clock import LeapingClock


async def test_a_leap_brings_what_is_due_by_then_and_moves_both_clocks() -> None:
    clock, rung = LeapingClock(asyncio.get_running_loop()), list[str]()
    mono, unix = clock.now(), clock.unix()
    clock.call_at(mono + 100, lambda: rung.append("soon"))
    clock.call_at(mono + 3600, lambda: rung.append("late"))
    clock.call_at(mono + 100, lambda: rung.append("never")).cancel()
    await asyncio.sleep(0.01)
    assert rung == []
    clock.leap(101)
    await asyncio.sleep(0.01)
    assert rung == ["soon"]
    assert clock.now() >= mono + 101 and clock.unix() >= unix + 101


async def test_held_it_moves_by_leaps_alone() -> None:
    clock, rung = LeapingClock(asyncio.get_running_loop()), list[str]()
    clock.call_at(clock.now() + 0.01, lambda: rung.append("before"))
    clock.hold()
    mono, unix = clock.now(), clock.unix()
    clock.call_at(mono + 0.01, lambda: rung.append("after"))
    clock.call_at(mono, lambda: rung.append("now"))
    await asyncio.sleep(0.05)
    assert rung == ["now"]
    assert (clock.now(), clock.unix()) == (mono, unix)
    clock.leap(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(rung) == ["after", "before", "now"]
    assert (clock.now(), clock.unix()) == (mono + 1, unix + 1)
