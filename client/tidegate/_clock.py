"""Time as the client sees it, in one place so that a test can have its own."""

import asyncio
import time


def now() -> float:
    """Monotonic seconds; only differences mean anything."""
    return time.monotonic()


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
