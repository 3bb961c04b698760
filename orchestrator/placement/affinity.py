"""Remembers which instance each conversation used last (OR-9)."""

from collections import OrderedDict

TTL_S = 600.0
MAX_SESSIONS = 65_536


class Affinity:
    """A hint for ties: renewed by use, forgotten after ``ttl_s`` or when there are too many.

    Times are seconds of the clock.
    """

    def __init__(self, ttl_s: float = TTL_S, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._homes: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, tenant: str, session: str, now: float) -> str:
        """The instance that had ``session`` last; empty if unknown."""
        if not session:
            return ""
        name, until = self._homes.get((tenant, session), ("", 0.0))
        return name if now < until else ""

    def record(self, tenant: str, session: str, name: str, now: float) -> None:
        """Note that a task of ``session`` was sent to the instance ``name``."""
        if not session:
            return
        self._homes[tenant, session] = (name, now + self._ttl_s)
        self._homes.move_to_end((tenant, session))
        # All entries live equally long, so the first is also the first to expire.
        while len(self._homes) > self._max_sessions or next(iter(self._homes.values()))[1] <= now:
            self._homes.popitem(last=False)
