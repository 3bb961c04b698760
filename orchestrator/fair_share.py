"""Fair turns for tenants: start-time fair queueing (Goyal, Vin and Cheng, 1996), and a gate."""

import asyncio
import heapq
from itertools import count

FAIR_LAG_JOBS = 4.0
_SMOOTHING = 0.05
_TENANTS = 1024
"""Most remembered tenants. Fewer ever wait at a time, so only idle ones are dropped."""
SHARE_OF_THE_REST = 3
"""A tenant may hold up to this many times the free part of a bounded resource: a single tenant
three quarters of it, two tenants 3/7 each, so that a new tenant finds room (dynamic thresholds;
Choudhury and Hahne, 1998)."""


def is_over_share(held: float, more: float, left: float) -> bool:
    """Whether a tenant that holds ``held`` of a resource may not have ``more``, if ``left`` is
    free. A tenant that holds nothing may have its first part while any is free."""
    return held > 0 and held + more > SHARE_OF_THE_REST * (left - more)


class FairShares:
    """Virtual service time of each tenant in ms; an idle tenant saves up nothing. A tenant that got
    up to ``lag_jobs`` mean jobs more than the least served tenant counts as equal to it."""

    def __init__(self, lag_jobs: float = FAIR_LAG_JOBS) -> None:
        self._lag_jobs = lag_jobs
        self._served_ms: dict[str, float] = {}
        self._floor_ms = 0.0
        self._mean_ms = 0.0

    def joined(self, tenant: str) -> None:
        self._served_ms[tenant] = max(self._served_ms.pop(tenant, 0.0), self._floor_ms)
        if len(self._served_ms) > _TENANTS:
            del self._served_ms[next(iter(self._served_ms))]

    def served(self, tenant: str, work_ms: float) -> None:
        before = self.of(tenant)
        self._floor_ms = max(self._floor_ms, before - self._lag_ms)
        self._served_ms[tenant] = before + work_ms
        self._mean_ms += (work_ms - self._mean_ms) * (_SMOOTHING if self._mean_ms else 1.0)

    @property
    def _lag_ms(self) -> float:
        return self._lag_jobs * self._mean_ms

    def of(self, tenant: str) -> float:
        return max(self._served_ms.get(tenant, 0.0), self._floor_ms)

    def next_of(self, tenants: list[str]) -> str:
        """The next tenant among ``tenants``, which are in the order of their first tasks."""
        if len(tenants) == 1:
            return tenants[0]
        served = [self.of(tenant) for tenant in tenants]
        most = min(served) + self._lag_ms
        return next(t for t, ms in zip(tenants, served, strict=True) if ms <= most)


class FairGate:
    """Admits one entry at a time: of the least served tenant, by rank, then by arrival."""

    def __init__(self) -> None:
        self.is_busy = False
        self._shares = FairShares(lag_jobs=0.0)
        self._waiting: dict[str, list[tuple[float, int, asyncio.Future[None]]]] = {}
        self._numbers = count()

    async def enter(self, tenant: str, rank: float = 0.0) -> None:
        """Wait for a turn; the caller must call ``leave`` afterwards."""
        self._shares.joined(tenant)
        if not self.is_busy:
            self.is_busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        own = self._waiting.setdefault(tenant, [])
        heapq.heappush(own, (rank, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._next()
            raise

    def leave(self, tenant: str, took_s: float) -> None:
        """End a turn that took ``took_s`` seconds of the tenant's time, and admit the next one."""
        self._shares.served(tenant, 1000 * took_s)
        self._next()

    def _next(self) -> None:
        for tenant, own in list(self._waiting.items()):
            while own and own[0][2].done():  # its waiter has left
                heapq.heappop(own)
            if not own:
                del self._waiting[tenant]
        self.is_busy = bool(self._waiting)
        if self._waiting:
            tenant = self._shares.next_of(list(self._waiting))
            heapq.heappop(self._waiting[tenant])[2].set_result(None)
