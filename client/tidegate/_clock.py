"""The client's clock, in one place so that a test can replace it."""

import asyncio
import time


def now() -> float:
    """Seconds of a monotonic clock; only differences mean anything."""
    return time.monotonic()


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
