"""Stories that are asked for at random times on the real stack, whatever became of the others."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from perf.load.chats import story

_LENGTHS: Final = (60, 150, 300)


async def ask_at_random(
    per_s: float,
    seconds: float,
    rng: random.Random,
    ask: Callable[[int], Coroutine[Any, Any, None]],
) -> int:
    """Have ``ask`` ask ``per_s`` times a second, each time with the next number from 0 on; returns
    how often it did, once all are answered."""
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Task[None]] = []
    until = loop.time() + seconds
    while loop.time() < until:
        asked.append(asyncio.ensure_future(ask(len(asked))))
        await asyncio.sleep(rng.expovariate(per_s))
    await asyncio.gather(*asked)
    return len(asked)


def story_request(rng: random.Random, deadline_ms: tuple[float, float]) -> dict[str, Any]:
    """A request for a story of which nobody says how long it will be, with a deadline between two,
    as many in each octave."""
    least, most = deadline_ms
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": story(rng)}],
        "max_tokens": rng.choice(_LENGTHS),
        "temperature": 1.0,
        "deadline_ms": round(least * (most / least) ** rng.random()),
    }
