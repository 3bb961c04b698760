"""The client's clock, in one place so that a test can replace it."""

import asyncio
import time


def now() -> float:
    """Seconds on a monotonic clock; only differences are meaningful."""
    return time.monotonic()


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
