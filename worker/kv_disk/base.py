"""What the engine asks of the tier below its KV pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class TierStats:
    """Totals since the worker began.

    ``saved_sessions`` are turns of conversations that are on disk as far as they are computed,
    ``failures`` files that could not be written or used, ``skipped_blocks`` blocks that were
    evicted before the disk had taken those before them.
    """

    saved_blocks: int = 0
    save_ms: float = 0.0
    loaded_blocks: int = 0
    load_ms: float = 0.0
    failures: int = 0
    skipped_blocks: int = 0
    saved_sessions: int = 0


class Tier(Protocol):
    """All of it is called on the engine's thread, and never waits."""

    def attach(self, wake: Callable[[], None]) -> None:
        """``wake`` is to be called, on any thread, when there are results."""

    @property
    def has_results(self) -> bool:
        """``collect`` has something to do."""

    def restore(self, waiting: Sequence[Request], now: float) -> None:
        """Have the next of the queue wait for their heads where those are worth loading."""

    def keep(self, request: Request) -> None:
        """A running request ends, and still has its blocks."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """These blocks hold what nobody may read: neither save nor restore any of them."""

    def collect(self, now: float) -> None:
        """Unpin what was copied, and let requests go on whose load is over."""

    def spill(self) -> None:
        """Save ahead of eviction, if there is nothing else to save."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Finish saving, which may take a moment, and take back everything. Idempotent."""


class NoTier:
    """No tier below the pool."""

    has_results = False

    def attach(self, wake: Callable[[], None]) -> None:
        pass

    def restore(self, waiting: Sequence[Request], now: float) -> None:
        pass

    def keep(self, request: Request) -> None:
        pass

    def forget(self, hashes: Sequence[bytes]) -> None:
        pass

    def collect(self, now: float) -> None:
        pass

    def spill(self) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        pass
