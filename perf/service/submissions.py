"""Submissions over HTTP, timed to their 202, at the largest rate that the machine carries."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

import aiohttp

from perf.report.stats import median

RATES: Final = (200.0, 100.0, 50.0, 25.0)
"""Rates in submissions per second, of which the first that the machine carries is used."""
ALONE: Final = 30
"""Number of submissions made one at a time, beside each round."""
MAX_QUEUED: Final = 3.0
"""Largest factor by which a 202 may take longer than one at a time, at a rate that is carried."""


class Round(Protocol):
    """Findings at one rate."""

    @property
    def is_carried(self) -> bool:
        """Whether little of what was measured is a wait for others."""


Found = TypeVar("Found", bound=Round)


def is_carried(together_ms: Sequence[float], alone_ms: Sequence[float]) -> bool:
    """Whether answers take little longer at a rate than one at a time, at their medians."""
    return median(together_ms) <= MAX_QUEUED * median(alone_ms)


async def submit(http: aiohttp.ClientSession, url: str, *, is_durable: bool) -> float:
    """Submit a task of a few tokens to the service at ``url``; returns the milliseconds to its 202.

    Raises ``RuntimeError`` for any other answer.
    """
    body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    began = time.perf_counter()
    async with http.post(f"{url}/v2/tasks", json=body | {"durable": is_durable}) as response:
        if response.status != 202:
            raise RuntimeError(await response.text())
    return 1000 * (time.perf_counter() - began)


async def at_rate(
    per_s: float, seconds: float, one: Callable[[int], Awaitable[float]]
) -> list[float]:
    """Begin ``per_s`` calls of ``one`` a second, which is told the number of each; returns what
    they return, in order."""
    asked, begun = list[asyncio.Future[float]](), time.perf_counter()
    for number in range(int(per_s * seconds)):
        await asyncio.sleep(max(0.0, begun + number / per_s - time.perf_counter()))
        asked.append(asyncio.ensure_future(one(number)))
    return await asyncio.gather(*asked)


async def at_largest_rate(measure: Callable[[float], Awaitable[Found]]) -> Found:
    """Result of ``measure`` at the first of ``RATES`` that the machine carried, else at the
    last."""
    for per_s in RATES:
        found = await measure(per_s)
        if found.is_carried:
            break
    return found
