"""A bound on connections, in all and per address; the last few are for operators.

::

    for everybody, 3/4 of them from one address │ operators │ beyond the limit
    ◀───────────── most - 16 ─────────────────▶ ◀── 16 ───▶ ◀── 64 at most ──▶
                                                ◀──── whoever is not an operator ─▶
                                                      gets a 503 and is closed
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from orchestrator.errors import NoCapacity

RESERVED_CONNECTIONS = 16
"""Connections kept for health checks, metrics and operators' calls, out of those allowed in all."""
MIN_CONNECTIONS = 2 * RESERVED_CONNECTIONS
_TURNED_AWAY = 64
"""Connections beyond those allowed that can be open at a time, to be heard and answered."""
_MAX_OF_ONE = 0.75
"""Share (0 to 1) of the connections that one address may have, and one key where there are
several."""


class Counted(Protocol):
    """A connection."""

    @property
    def is_serving(self) -> bool:
        """Whether a request is in progress."""

    def turn_away(self) -> None:
        """Close the connection without having heard what it wants."""


class KeyShares:
    """Bounds the requests in progress of each key, and with them the connections that it takes,
    from however many addresses."""

    def __init__(self, most: int) -> None:
        """``most`` is the bound on all connections."""
        self._most = max(1, int(_MAX_OF_ONE * (most - RESERVED_CONNECTIONS)))
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def counted(self, key: str) -> Iterator[None]:
        """Count a request while the block runs. Raises ``NoCapacity`` for a key that has its full
        share."""
        if self._by_key[key] >= self._most:
            raise NoCapacity(
                f"{self._most} requests of this key are under way, which is its share of the "
                "connections; try again when some of them have ended",
                retry_after_ms=1000.0,
            )
        self._by_key[key] += 1
        try:
            yield
        finally:
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]


class ConnectionLimit:
    """Allows at most ``most`` connections, three quarters of them from one address."""

    def __init__(self, most: int) -> None:
        self._usual = most - RESERVED_CONNECTIONS
        self._beyond = RESERVED_CONNECTIONS + min(_TURNED_AWAY, most // 2)
        self._by_address: Counter[str] = Counter()
        self._reserved: dict[Counted, None] = {}
        """Connections beyond those for everybody, the longest silent first."""

    def opened(self, connection: Counted, address: str) -> bool:
        """Count a connection; False if it is one of the last few, which are not for every request.

        Where there are too many of those, the one that has been silent for longest is closed.
        """
        own = self._by_address[address]
        most_of_one = max(1, _MAX_OF_ONE * self._usual)
        if self._by_address.total() < self._usual and own < most_of_one:
            self._by_address[address] += 1
            return True
        if len(self._reserved) >= self._beyond:
            silent = (other for other in self._reserved if not other.is_serving)
            gone = next(silent, connection)
            self._reserved.pop(gone, None)
            gone.turn_away()
        self._reserved[connection] = None
        return False

    def heard(self, connection: Counted) -> None:
        """Note that one of the last few has said something: the others are closed before it."""
        if connection in self._reserved:
            self._reserved[connection] = self._reserved.pop(connection)

    def closed(self, connection: Counted, address: str, *, is_reserved: bool) -> None:
        if is_reserved:
            self._reserved.pop(connection, None)
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
