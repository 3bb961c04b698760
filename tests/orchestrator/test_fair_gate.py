"""One at a time, and no tenant behind all that another has sent (OR-24)."""

import asyncio

from orchestrator.fair_share import FairGate


async def test_a_tenant_waits_for_one_of_anothers_at_most() -> None:
    gate, log, release = FairGate(), list[str](), asyncio.Event()

    async def work(tenant: str, name: str, rank: float = 0.0) -> None:
        await gate.enter(tenant, rank)
        log.append(name)
        await release.wait()
        gate.leave(tenant, 1.0)

    async with asyncio.TaskGroup() as group:
        for number, rank in enumerate((0, 3, 1, 2)):
            group.create_task(work("a", f"a{number}", rank))
        await asyncio.sleep(0)
        group.create_task(work("b", "b0"))
        group.create_task(work("c", "c0"))
        await asyncio.sleep(0)
        release.set()
    assert log == ["a0", "b0", "c0", "a2", "a3", "a1"]
    assert not gate.is_busy


async def test_one_that_is_gone_holds_up_nobody() -> None:
    """Neither one that waited, nor one whose turn comes at the moment at which it goes."""
    gate = FairGate()
    await gate.enter("a")
    waiting, chosen, last = (asyncio.create_task(gate.enter("a", rank)) for rank in (2, 1, 3))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.leave("a", 1.0)
    chosen.cancel()
    await last
    gate.leave("a", 1.0)
    assert not gate.is_busy
