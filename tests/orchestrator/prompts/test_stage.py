"""The encoding stage: earliest deadline first, bounded, and left when a deadline has passed."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.api.http.responses import error_headers
from orchestrator.clock import LoopClock
from orchestrator.errors import QueueFull
from orchestrator.prompts.stage import SMALL_BYTES, EncodingStage, Steps

FAR_S = 3600.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def stage_of(
    executor: ThreadPoolExecutor, *, threads: int = 1, max_bytes: int = 2**20
) -> EncodingStage:
    return EncodingStage(executor, threads, max_bytes, LoopClock(asyncio.get_running_loop()))


def counting(steps: int, log: list[str], name: str) -> Steps[str]:
    for _ in range(steps):
        log.append(name)
        yield False
    return name


def held(gate: threading.Event, *, is_long: bool = False) -> Steps[str]:
    if is_long:
        yield True
    assert gate.wait(30)
    yield False
    return "held"


async def until_idle(stage: EncodingStage) -> None:
    """Threads tell the loop when they are done; nobody waits for what was left undone."""
    while stage.held_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_the_earliest_deadline_goes_first_between_steps(executor: ThreadPoolExecutor) -> None:
    stage = stage_of(executor)
    now, log, gate = stage.clock.now(), list[str](), threading.Event()
    first = asyncio.create_task(stage.run(held(gate), 1, now + FAR_S))
    await asyncio.sleep(0)
    late = asyncio.create_task(stage.run(counting(3, log, "late"), 1, now + FAR_S + 2))
    early = asyncio.create_task(stage.run(counting(3, log, "early"), 1, now + FAR_S + 1))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(first, late, early) == ["held", "late", "early"]
    assert log == ["early"] * 3 + ["late"] * 3
    assert stage.held_bytes == 0


async def test_or24_tenants_go_in_turn_and_each_ones_own_by_deadline(
    executor: ThreadPoolExecutor,
) -> None:
    stage = stage_of(executor)
    now, log, gate = stage.clock.now(), list[str](), threading.Event()
    first = asyncio.create_task(stage.run(held(gate), 1, now + FAR_S, tenant="many"))
    await asyncio.sleep(0)
    wanted = [("many", 2.0), ("many", 1.0), ("other", 3.0)]
    asked = [
        asyncio.create_task(
            stage.run(counting(1, log, f"{tenant} {due_s:g}"), 1, now + FAR_S + due_s, "", tenant)
        )
        for tenant, due_s in wanted
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *asked)
    assert log == ["other 3", "many 1", "many 2"]


async def test_or24_one_tenant_never_holds_all_bytes(executor: ThreadPoolExecutor) -> None:
    stage = stage_of(executor, max_bytes=64 * SMALL_BYTES)
    due, gate = stage.clock.now() + FAR_S, threading.Event()
    taken, most = list[asyncio.Task[str]](), {"many": 48, "other": 12, "third": 3}
    for tenant, count in most.items():
        for _ in range(count):
            one = stage.run(held(gate), SMALL_BYTES, due, tenant=tenant)
            taken.append(asyncio.create_task(one))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="prompts of this tenant"):
            await stage.run(held(gate), SMALL_BYTES, due, tenant=tenant)
    gate.set()
    await asyncio.gather(*taken)
    assert stage.held_bytes == 0


async def test_a_long_step_never_takes_the_last_thread(executor: ThreadPoolExecutor) -> None:
    stage = stage_of(executor, threads=2)
    due, gate = stage.clock.now() + FAR_S, threading.Event()
    long = [asyncio.create_task(stage.run(held(gate, is_long=True), 1, due)) for _ in range(3)]
    try:
        for _ in range(5):
            assert await stage.run(counting(3, [], "short"), 1, due + 1) == "short"
        assert not any(task.done() for task in long)
    finally:
        gate.set()
    assert await asyncio.gather(*long) == ["held"] * 3


async def test_a_deadline_ends_the_wait_and_what_is_left_undone(
    executor: ThreadPoolExecutor,
) -> None:
    stage = stage_of(executor)
    log, gate = list[str](), threading.Event()
    busy = asyncio.create_task(stage.run(held(gate), 5, stage.clock.now() + FAR_S))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await stage.run(counting(3, log, "late"), 7, stage.clock.now() + 0.01)
    await asyncio.sleep(0)
    assert stage.held_bytes == 5
    waits = asyncio.create_task(stage.run(counting(3, log, "gone"), 7, stage.clock.now() + FAR_S))
    await asyncio.sleep(0)
    waits.cancel()
    assert not busy.done()
    gate.set()
    assert await busy == "held"
    await until_idle(stage)
    assert log == []


async def test_a_running_step_whose_deadline_passes_is_the_last(
    executor: ThreadPoolExecutor,
) -> None:
    stage = stage_of(executor)
    gate, log = threading.Event(), list[str]()

    def steps() -> Steps[None]:
        try:
            yield from held(gate)
            log.append("went on")
        finally:
            log.append("closed")

    with pytest.raises(TimeoutError):
        await stage.run(steps(), 1, stage.clock.now() + 0.01)
    gate.set()
    await until_idle(stage)
    assert log == ["closed"]


async def test_bytes_are_bounded_with_some_left_for_small_prompts(
    executor: ThreadPoolExecutor,
) -> None:
    stage = stage_of(executor, max_bytes=8 * SMALL_BYTES)
    due, gate = stage.clock.now() + FAR_S, threading.Event()
    # Whatever its size, one alone is taken.
    first = asyncio.create_task(stage.run(held(gate), 7 * SMALL_BYTES, due))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=f"prompts of {7 * SMALL_BYTES} bytes") as refused:
        await stage.run(held(gate), SMALL_BYTES + 1, due, tenant="b")
    assert float(error_headers(refused.value)["Retry-After"]) >= 1
    small = asyncio.create_task(stage.run(held(gate), SMALL_BYTES, due, tenant="b"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await stage.run(held(gate), 1, due)
    gate.set()
    assert await asyncio.gather(first, small) == ["held", "held"]
    assert stage.held_bytes == 0
