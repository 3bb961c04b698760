"""A queue of clips that wait for buffers, least slack first."""

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from clips.render.buffers import BufferPool, Lease
from clips.render.errors import OutOfTime


class ClipQueueFull(Exception):
    """The maximum number of clips is already waiting."""


@dataclass(order=True, slots=True)
class _Waiting:
    start_by: float
    """Latest start, on ``time.monotonic``, with which the clip can finish in time."""
    number: int
    lease: "asyncio.Future[Lease]" = field(compare=False)


MOST_WAITING: Final = 64
"""Maximum number of waiting clips; further clips are refused."""


class ClipQueue:
    """Hands out leases. All code except the return of buffers runs on one event loop."""

    def __init__(self, pool: BufferPool, now: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._now = now
        self._waiting: list[_Waiting] = []  # sorted
        self._numbers = count()
        self._running: dict[Lease, float] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def free_in_s(self) -> tuple[float, ...]:
        """Expected seconds until the return of each lent lease."""
        now = self._now()
        return tuple(sorted(max(0.0, end - now) for end in self._running.values()))

    def wait_s(self, start_by: float, each_s: float) -> float:
        """Expected wait in seconds of a clip with ``start_by``, at ``each_s`` per clip."""
        ends = [0.0] * self._pool.free + [*self.free_in_s()]
        for _ in range(sum(1 for other in self._waiting if other.start_by <= start_by)):
            ends = sorted((*ends[1:], ends[0] + each_s))
        return ends[0] if ends else 0.0

    async def acquire(self, start_by: float, takes_s: float, give_up_at: float) -> Lease:
        """Wait for this clip's turn and return its buffers, which it uses for ``takes_s``.

        ``start_by`` orders the clips. ``give_up_at`` is when to stop waiting; it is later if a
        reduced clip can still start then. Raises ``ClipQueueFull``, or ``OutOfTime`` if the clip's
        turn has not come by then.
        """
        lease = self._pool.lease() if not self._waiting else None
        if lease is None:
            if len(self._waiting) >= MOST_WAITING:
                raise ClipQueueFull(f"{MOST_WAITING} slots wait already")
            lease = await self._wait(start_by, give_up_at)
        self._running[lease] = self._now() + takes_s
        return lease

    def release(self, lease: Lease) -> None:
        """Return a lease, and give its buffers to the next clip."""
        self._running.pop(lease, None)
        lease.close()
        self._hand_on()

    async def _wait(self, start_by: float, give_up_at: float) -> Lease:
        waiting = _Waiting(
            start_by, next(self._numbers), asyncio.get_running_loop().create_future()
        )
        insort(self._waiting, waiting)
        try:
            async with asyncio.timeout(max(0.0, give_up_at - self._now())):
                return await asyncio.shield(waiting.lease)
        except TimeoutError:
            self._leave(waiting)
            raise OutOfTime("queue", "its turn did not come in time") from None
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def _leave(self, waiting: _Waiting) -> None:
        """Remove a clip that no longer waits; if it just got a lease, pass it to the next one."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        if waiting.lease.done():
            waiting.lease.result().close()
            self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            lease = self._pool.lease()
            if lease is None:
                return
            self._waiting.pop(0).lease.set_result(lease)
