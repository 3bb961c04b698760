"""How many connections there are, in all and per address; the last few are for operators.

::

    for everybody, 3/4 of them from one address │ operators │ beyond the limit
    ◀───────────── most - 16 ─────────────────▶ ◀── 16 ───▶ ◀── 64 at most ──▶
                                                ◀──── whoever is no operator ─▶
                                                      gets a 503 and is closed
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from orchestrator.errors import NoCapacity

RESERVED_CONNECTIONS = 16
"""Of those allowed in all, for health checks, metrics and operators' calls only."""
MIN_CONNECTIONS = 2 * RESERVED_CONNECTIONS
_TURNED_AWAY = 64
"""Beyond those allowed in all: so many can say what they want, and be answered, at a time."""
_MOST_OF_ONE = 0.75
"""Of the connections, what one address may have, and one key where there are several."""


class Counted(Protocol):
    """A connection."""

    @property
    def is_serving(self) -> bool:
        """Whether a request is under way."""

    def turn_away(self) -> None:
        """Close without having heard what it wants."""


class KeyShares:
    """How many requests are under way with each key, and so connections are taken, from however
    many addresses."""

    def __init__(self, most: int) -> None:
        """``most`` connections there may be."""
        self._most = max(1, int(_MOST_OF_ONE * (most - RESERVED_CONNECTIONS)))
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def counted(self, key: str) -> Iterator[None]:
        """Count one in. Raises ``NoCapacity`` for a key that has its share."""
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
    """At most ``most`` connections, three quarters of them from one address."""

    def __init__(self, most: int) -> None:
        self._usual = most - RESERVED_CONNECTIONS
        self._beyond = RESERVED_CONNECTIONS + min(_TURNED_AWAY, most // 2)
        self._by_address: Counter[str] = Counter()
        self._reserved: dict[Counted, None] = {}
        """Connections beyond those for everybody, the longest silent first."""

    def opened(self, connection: Counted, address: str) -> bool:
        """Count a connection; False when it is not for everything.

        Of those the one that has been silent for longest makes room for the next.
        """
        own = self._by_address[address]
        most_of_one = max(1, _MOST_OF_ONE * self._usual)
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
        """One of the last few has said something: the others go before it."""
        if connection in self._reserved:
            self._reserved[connection] = self._reserved.pop(connection)

    def closed(self, connection: Counted, address: str, *, is_reserved: bool) -> None:
        if is_reserved:
            self._reserved.pop(connection, None)
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
