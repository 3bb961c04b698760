"""How long this client itself stood still: time that no server can be blamed for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

_EVERY_S: Final = 0.02


@dataclass(slots=True)
class Stillness:
    """``worst_s`` is the longest time for which the event loop was late."""

    worst_s: float = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            await asyncio.sleep(_EVERY_S)
            self.worst_s = max(self.worst_s, clock() - began - _EVERY_S)


@asynccontextmanager
async def watched() -> AsyncIterator[Stillness]:
    """Measure it during the body."""
    stillness = Stillness()
    task = asyncio.create_task(stillness.watch())
    try:
        yield stillness
    finally:
        task.cancel()
        await asyncio.wait([task])
