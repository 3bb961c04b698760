"""How many connections there are, in all and per address; the last few are for operators."""

from collections import Counter
from typing import Protocol

RESERVED_CONNECTIONS = 16
"""Of those allowed in all, for health checks, metrics and operators' calls only."""
MIN_CONNECTIONS = 2 * RESERVED_CONNECTIONS
_MOST_PER_ADDRESS = 0.75


class Counted(Protocol):
    """A connection."""

    @property
    def is_serving(self) -> bool:
        """Whether a request is under way."""

    def drop(self) -> None:
        """Close at once."""


class ConnectionLimit:
    """At most ``most`` connections, three quarters of them from one address."""

    def __init__(self, most: int) -> None:
        self._usual = most - RESERVED_CONNECTIONS
        self._by_address: Counter[str] = Counter()
        self._reserved: dict[Counted, None] = {}
        """Connections beyond those for everybody, the longest silent first."""

    def opened(self, connection: Counted, address: str) -> bool:
        """Count a connection; False when it is not for everything.

        Of those the one that has been silent for longest makes room for the next.
        """
        own = self._by_address[address]
        most_of_one = max(1, _MOST_PER_ADDRESS * self._usual)
        if self._by_address.total() < self._usual and own < most_of_one:
            self._by_address[address] += 1
            return True
        if len(self._reserved) >= RESERVED_CONNECTIONS:
            silent = (other for other in self._reserved if not other.is_serving)
            gone = next(silent, connection)
            self._reserved.pop(gone, None)
            gone.drop()
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
