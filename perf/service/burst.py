"""Clients that all go in one instant: tokens that are still made for nobody (WP-1, WP-5).

Every stream is running when its socket closes. What counts is the tokens that came from workers
behind the abort, per abort: with steps of 20 ms, one is what a step under way makes. Whatever keeps
the news from the engine adds one per step, so this shows a queue of cancels anywhere on the way.
"""

import asyncio
from contextlib import AsyncExitStack

from perf.load.connection import FIRST_TEXT, HOST, HttpConnection
from perf.load.drive import PATH, completion
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from perf.stack.scrape import Scrape, scrape
from perf.stack.stack import Stack, StackSpec

COUNTS = (32, 256)
STEP_MS = 20.0
_TOKENS = 1500
_FREED_MS = "tidegate_cancellation_detection_latency_ms"


async def run(context: Context) -> list[Figure]:
    stack = await context.stack(
        StackSpec(
            "synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=max(COUNTS)
        )
    )
    assert context.card is not None
    figures = []
    for count in COUNTS:
        turns = [
            await _all_go(stack, context.card.model, count)
            for _ in range(2 if context.quick else 5)
        ]
        late = [turn.total("tidegate_tokens_late_total") / count for turn in turns]
        freed_ms = [turn.total(f"{_FREED_MS}_sum") / count for turn in turns]
        label = f"{count} clients go at once"
        figures += [
            Figure.of(f"burst.late_tokens_{count}", f"{label}: late tokens per abort", "", late),
            Figure.of(f"burst.freed_ms_{count}", f"{label}: until the last word", "ms", freed_ms),
        ]
    return figures


async def _all_go(stack: Stack, model: str, count: int) -> Scrape:
    """Open ``count`` streams and close all at once; returns what the service counted meanwhile."""
    async with AsyncExitStack() as stacked:
        clients = [
            await stacked.enter_async_context(HttpConnection(HOST, stack.port))
            for _ in range(count)
        ]
        for client in clients:
            client.send("POST", PATH, completion(model, _TOKENS))
        await asyncio.gather(*(client.until(FIRST_TEXT) for client in clients))
        before = await scrape(HOST, stack.port)
        for client in clients:
            client.drop()
    while True:
        await asyncio.sleep(0.5)  # not oftener: what is read here is made on the service's own loop
        after = await scrape(HOST, stack.port)
        counted = Scrape.between(before, after)
        if after.is_idle and counted.total(f"{_FREED_MS}_count") >= count:
            return counted


BENCH = Bench("burst", "late tokens when all clients go at once", run, limit_s=60, in_quick=False)
