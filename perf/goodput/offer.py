"""Sends a load through one orchestrator, until its workers have nothing left of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from perf.goodput.policies import Policy
from perf.load.connection import HOST
from perf.load.drive import apply_open_loop
from perf.load.open_loop import OpenLoopPlan, Result, StreamRequest
from perf.stack.scrape import scrape
from perf.stack.stack import orchestrating
from pool.units.orchestrator import OrchestratorProcess

_IDLE_S = 30.0


@asynccontextmanager
async def services(
    policies: Iterable[tuple[Policy, Sequence[str]]],
) -> AsyncIterator[dict[str, OrchestratorProcess]]:
    """Run one orchestrator per policy in front of its instances; yields them by the policy's
    name."""
    async with AsyncExitStack() as stack:
        yield {
            policy.name: await stack.enter_async_context(
                orchestrating(instances, policy.env(), f"goodput-{policy.name}")
            )
            for policy, instances in policies
        }


async def offer(
    service: OrchestratorProcess,
    policy: Policy,
    path: str,
    asks: list[StreamRequest],
    linger_s: float,
) -> list[Result]:
    """Send ``asks`` and wait for their ends. Raises ``RuntimeError`` when work outlasts its
    clients."""
    results = await apply_open_loop(
        OpenLoopPlan(
            HOST,
            service.port,
            path,
            asks,
            policy.states_deadline,
            linger_s,
            hang_up=policy.hangs_up,
        )
    )
    end = time.monotonic() + _IDLE_S
    while not (await scrape(HOST, service.port)).is_idle:
        if time.monotonic() > end:
            raise RuntimeError(f"{policy.label}: work was left {_IDLE_S:.0f} s after its clients")
        await asyncio.sleep(0.1)
    return results
