"""The interface of the tier below the engine's KV pool."""

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
    """A tier below the KV pool. All methods are called on the engine's thread and never wait."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Set what is called, on any thread, when there are results."""

    @property
    def has_results(self) -> bool:
        """Whether ``collect`` has something to do."""

    def restore(self, waiting: Sequence[Request], now: float) -> None:
        """Have the next requests in the queue wait for their heads, where worth loading."""

    def keep(self, request: Request) -> None:
        """Take what is worth keeping of a request that ends and still has its blocks."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Neither save nor restore these blocks: they hold what nobody may read."""

    def collect(self, now: float) -> None:
        """Unpin blocks that were copied, and let requests go on whose load is over."""

    def spill(self) -> None:
        """Save blocks ahead of their eviction, if there is nothing else to save."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Finish saving, which may take a moment, and unpin all blocks. Idempotent."""


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
