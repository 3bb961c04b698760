"""Keeps the KV of conversations between two turns, while an agent's tools run (WK-9).

::

    a turn ends ─▶ kept: its full blocks are evicted after all others
                     ├─ the next turn ends in time ─▶ kept again, with the new blocks
                     ├─ its time is over, or others need its share ─▶ cached like any other
                     └─ running work needs the blocks ─▶ evicted, the least recently used first

Kept blocks still count as free: no work ever waits for them, and admission and health ignore them.
A disk tier has all ended turns, so evicted blocks are loaded from there.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from worker.scheduler.block_pool import BlockPool
from worker.scheduler.request import Request


@dataclass(slots=True)
class _Kept:
    hashes: list[bytes]
    until: float


class KeptSessions:
    """The kept conversations. Used by the engine on its thread; times are of its clock."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._most_blocks = pool.total // 2
        """The other half is for prefixes that other requests may use again."""
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()
        """Kept conversations, least recently used first, by their tenant's root hash and name."""
        self.next_expiry = math.inf
        """Earliest time at which ``expire`` may have work to do."""

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, request: Request) -> None:
        """Record that a conversation's next turn has arrived and may wait; ``end`` follows."""
        kept = self._kept.get((request.root_hash, request.job.session))
        if kept is not None:
            kept.until = max(kept.until, request.job.deadline)

    def end(self, request: Request, now: float) -> None:
        """Record the end of a turn; the request still has its blocks, if it ever had any."""
        job = request.job
        if not job.session:
            return
        name = request.root_hash, job.session
        kept = self._kept.get(name)
        hashes = request.hashes[: min(request.full_blocks, self._most_blocks)]
        if kept is not None and kept.hashes[: len(hashes)] == hashes:
            hashes = kept.hashes
        if job.session_keep_s > 0 and hashes:
            self._keep(name, hashes, now + job.session_keep_s)
        elif kept is not None:
            self._give_up(name)

    def expire(self, now: float) -> None:
        """Drop expired conversations. Costs one comparison if there are none."""
        if now < self.next_expiry:
            return
        for name, kept in list(self._kept.items()):
            if kept.until <= now:
                self._give_up(name)
        self.next_expiry = min((kept.until for kept in self._kept.values()), default=math.inf)

    def _keep(self, name: tuple[bytes, str], hashes: list[bytes], until: float) -> None:
        self._pool.keep(hashes)
        before = self._kept.get(name)
        if before is not None:
            self._pool.unkeep(before.hashes)
        self._kept[name] = _Kept(hashes, until)
        self._kept.move_to_end(name)
        self.next_expiry = min(self.next_expiry, until)
        # Many conversations may share one prefix, so their number is limited too.
        while self._pool.kept_hashes > self._most_blocks or len(self._kept) > self._pool.total:
            self._give_up(next(iter(self._kept)))

    def _give_up(self, name: tuple[bytes, str]) -> None:
        self._pool.unkeep(self._kept.pop(name).hashes)
