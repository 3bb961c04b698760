"""Sends a load to a server, and waits until all of its work has ended."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from perf.load.drive import apply_open_loop
from perf.load.open_loop import OpenLoopPlan, Result
from perf.stack.scrape import scrape

BUSY: Final = ("tidegate_queue_depth", "tidegate_worker_jobs")
"""Gauges of an orchestrator that are 0 when it and its workers have nothing to do."""
_IDLE_S: Final = 30.0


async def offer(plan: OpenLoopPlan, label: str, busy: Sequence[str] = BUSY) -> list[Result]:
    """Offer the requests of ``plan`` and wait until every gauge of ``busy`` is 0.

    Raises ``RuntimeError``, which names ``label``, when work outlasts its clients.
    """
    results = await apply_open_loop(plan)
    end = time.monotonic() + _IDLE_S
    while True:
        gauges = await scrape(plan.host, plan.port)
        if not any(gauges.total(name) for name in busy):
            return results
        if time.monotonic() > end:
            raise RuntimeError(f"{label}: work was left {_IDLE_S:.0f} s after its clients")
        await asyncio.sleep(0.1)
