"""A gate that admits one at a time and takes tenants in turn, so none waits behind another's
backlog."""

import asyncio
import heapq
from itertools import count

from orchestrator.fair_share import FairShares


class FairGate:
    """Admits one at a time: from the tenant that has had the least time, the entry of the smallest
    rank, and among equals the first that came."""

    def __init__(self) -> None:
        self.is_busy = False
        self._shares = FairShares(lag_jobs=0.0)
        self._waiting: dict[str, list[tuple[float, int, asyncio.Future[None]]]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return sum(not entry[2].done() for own in self._waiting.values() for entry in own)

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
            if not turn.cancelled():  # the turn came at the same moment
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
