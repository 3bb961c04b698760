"""A pool brought in line with its file, on virtual time with simulated units (PV-1)."""

import asyncio

from pool.events import EventKind
from pool.manager import Manager
from pool.supervise import RestartPolicy, UnitState
from tests.support.fake_pool import LOAD_S, FakeMachine, FakeSpec, killed, simulated


def specs(*wanted: FakeSpec) -> dict[str, FakeSpec]:
    return {spec.name: spec for spec in wanted}


A, B, C = FakeSpec("a"), FakeSpec("b"), FakeSpec("c")


async def up(machine: FakeMachine, *wanted: FakeSpec) -> Manager:
    manager = machine.manager()
    await manager.recover(specs(*wanted))
    await manager.apply(specs(*wanted))
    await asyncio.sleep(LOAD_S + 1)
    return manager


@simulated
async def test_a_lost_one_comes_back_on_its_port_and_is_not_ready_meanwhile() -> None:
    machine = FakeMachine()
    manager = await up(machine, A, B)
    machine.running()["a"].ended.set()
    await asyncio.sleep(0.01)
    assert machine.ready == {"127.0.0.1:9002"}
    assert manager.members["a"].reason == "it died"
    await asyncio.sleep(LOAD_S + 2)
    assert machine.ready == {"127.0.0.1:9001", "127.0.0.1:9002"}
    assert manager.members["a"].restarts == 1
    assert machine.kinds("a")[-4:] == [
        EventKind.LOST,
        EventKind.FITS,
        EventKind.SPAWNED,
        EventKind.READY,
    ]
    assert manager.members["b"].restarts == 0
    await manager.stop(1.0)


@simulated
async def test_a_crash_loop_is_tried_once_a_minute_and_the_others_go_on() -> None:
    machine = FakeMachine()
    machine.failing["a 1"] = 10**9
    manager = await up(machine, A, B)
    await asyncio.sleep(24 * 3600)
    times = [at for at, name in machine.starts if name == "a"]
    pauses = [after - before for before, after in zip(times[-100:], times[-99:], strict=False)]
    assert all(15 + LOAD_S <= pause <= 60 + LOAD_S for pause in pauses), "with jitter"
    assert len({round(pause, 3) for pause in pauses}) > 50
    assert len([name for _, name in machine.starts if name == "b"]) == 1
    assert machine.ready == {"127.0.0.1:9002"}
    assert manager.members["a"].state in (UnitState.DOWN, UnitState.STARTING)
    assert EventKind.FAILED in machine.kinds("a")
    machine.failing.clear()
    await asyncio.sleep(120)
    assert manager.members["a"].is_ready, "mended"
    await manager.stop(1.0)


@simulated
async def test_under_the_policy_of_a_launch_it_is_given_up_unless_it_served_for_a_while() -> None:
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, max_failures=3, stable_s=30.0)
    machine = FakeMachine()
    manager = machine.manager(policy=policy)
    member = manager.add(A)
    for served_s in (31, 0.1, 0.1, 31, 0.1, 0.1):
        await asyncio.sleep(LOAD_S + served_s)
        machine.running()["a"].ended.set()
    await asyncio.sleep(LOAD_S + 1)
    assert member.is_ready, "what failed before it served for long is forgiven"
    machine.failing["a 1"] = 1
    machine.running()["a"].ended.set()
    reason = await member.given_up()
    assert reason.startswith("a failed 4 times in a row; the last time: ")
    assert machine.running() == {}, "what failed is cleaned up"
    await manager.stop(0.0)


@simulated
async def test_a_mistake_of_ours_leaves_no_instance_unkept() -> None:
    machine = FakeMachine()
    manager = await up(machine, A, B)
    unit = manager.members["a"].unit
    machine.running()["a"].ended.set()
    stop, breaks = unit.stop, iter([True])

    async def stumble(drain_s: float) -> None:
        if next(breaks, False):
            raise ValueError("nobody thought of this")
        await stop(drain_s)

    unit.stop = stumble  # type: ignore[method-assign]
    await asyncio.sleep(1)
    assert "nobody thought of this" in manager.members["a"].reason
    assert machine.ready == {"127.0.0.1:9002"}
    await asyncio.sleep(120)
    assert manager.members["a"].is_ready
    await manager.stop(0.0)


@simulated
async def test_a_changed_one_is_replaced_without_a_moment_of_none() -> None:
    machine = FakeMachine()
    manager = await up(machine, A)
    old = machine.running()["a"]
    machine.told_ready.clear()
    await manager.apply(specs(FakeSpec("a", 2)))
    assert old.ended.is_set() and old.drained_s == 30.0
    assert frozenset() not in machine.told_ready
    assert machine.running()["a"].digest == "a 2"
    assert machine.ready == {"127.0.0.1:9002"}
    assert not manager.incoming
    await manager.stop(0.0)


@simulated
async def test_a_replacement_that_fails_leaves_the_old_one() -> None:
    machine = FakeMachine()
    manager = await up(machine, A)
    old = machine.running()["a"]
    machine.failing["a 2"] = 1
    assert not await manager.replace("a", FakeSpec("a", 2))
    assert machine.running()["a"] is old
    assert manager.members["a"].is_ready
    assert EventKind.KEPT in machine.kinds("a")
    assert await manager.replace("a", FakeSpec("a", 2)), "it can be asked for again"
    await manager.stop(0.0)


@simulated
async def test_without_room_or_with_fixed_ports_the_old_one_ends_first() -> None:
    for has_room, spec in ((False, FakeSpec("a", 2)), (True, FakeSpec("a", 2, False))):
        machine = FakeMachine()
        manager = await up(machine, A)
        machine.has_room = has_room
        assert await manager.replace("a", spec)
        assert machine.ready == {"127.0.0.1:9001"}, "on its port"
        assert frozenset() in machine.told_ready
        await manager.stop(0.0)


@simulated
async def test_the_next_manager_goes_on_with_what_runs() -> None:
    machine = FakeMachine()
    first = await up(machine, A, B)
    machine.running()["b"].ended.set()
    await asyncio.sleep(0.1)
    await killed(first)
    before, starts = machine.running(), len(machine.starts)
    machine.told_ready.clear()
    second = await up(machine, A, B)
    assert machine.running()["a"] is before["a"]
    assert machine.running()["b"].port == 9002, "its port was kept"
    assert [name for _, name in machine.starts[starts:]] == ["b"]
    assert machine.kinds("a")[-1] is EventKind.ADOPTED
    assert second.members["b"].is_ready
    machine.running()["a"].ended.set()
    await asyncio.sleep(LOAD_S + 2)
    assert second.members["a"].is_ready, "it is kept up, too"
    await second.stop(1.0)
    assert machine.running() == {}


@simulated
async def test_what_has_changed_while_nobody_watched_is_brought_in_line() -> None:
    machine = FakeMachine()
    await killed(await up(machine, A, B))
    old = machine.running()
    second = await up(machine, FakeSpec("a", 2), C)
    assert old["a"].drained_s == 30.0 and old["b"].drained_s == 30.0
    assert {n: s.digest for n, s in machine.running().items()} == {"a": "a 2", "c": "c 1"}
    await second.stop(0.0)


@simulated
async def test_of_two_with_one_name_the_one_that_served_stays() -> None:
    """Killed in the middle of a replacement."""
    for lost_state in (False, True):
        machine = FakeMachine()
        first = await up(machine, A)
        old = machine.running()["a"]
        asyncio.create_task(first.replace("a", FakeSpec("a", 2)))  # noqa: RUF006
        await asyncio.sleep(LOAD_S / 2)
        await killed(first)
        assert len(machine.found()) == 2
        if lost_state:
            machine.written.instances.clear()
        second = machine.manager()
        await second.recover(specs(A))
        assert machine.running()["a"] is old
        assert second.members["a"].is_ready
        await second.stop(0.0)
        assert machine.running() == {}


@simulated
async def test_one_that_ended_between_finding_and_taking_hold_is_started() -> None:
    machine = FakeMachine()
    await killed(await up(machine, A))
    found = machine.found()
    machine.running()["a"].ended.set()
    machine.found = lambda: found  # type: ignore[method-assign]
    second = await up(machine, A)
    assert second.members["a"].is_ready
    assert len(machine.starts) == 2
    await second.stop(0.0)
