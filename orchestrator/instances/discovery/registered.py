"""Instances that a pool manager registers for a time, and registers again (PV-1).

A registration that runs out is not the end of an instance that serves: its lanes know its state
better than a manager that was not heard of. It ends once the instance is not ready either.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.errors import InvalidRequest
from orchestrator.instances.discovery.addresses import check_address
from orchestrator.lanes.endpoint import is_url, name_of, read_endpoint

NAME = "registered"
MAX = 256
"""Most registrations at a time."""
MIN_TTL_S = 1.0
MAX_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A registration of ``ttl_s`` seconds. ``is_new``: the address was not registered before."""

    address: str
    ttl_s: float
    is_new: bool


class RegisteredInstances:
    """A source of addresses that others push (``sources.Source``)."""

    name = NAME
    every_s = 2.0

    def __init__(self, clock: Clock, is_ready: Callable[[str], bool]) -> None:
        self._clock = clock
        self._is_ready = is_ready
        self._ends_at: dict[str, float] = {}
        self._told: frozenset[str] | None = None

    def register(self, address: str, ttl_s: float) -> Registration:
        """Register an instance for ``ttl_s`` seconds from now, or renew it. Raises
        ``InvalidRequest``."""
        try:
            check_address(address)
            # Otherwise whoever may register could have any file here sent to any host.
            if is_url(address) and read_endpoint(address).key_file is not None:
                raise ValueError("key_file is for TIDEGATE_INSTANCES and files that it names")
            taken = self._entry_of(name_of(address))
            if taken is not None and taken != address:
                raise ValueError(f"{name_of(address)} is registered with another URL; take it off")
        except ValueError as error:
            raise InvalidRequest(f"address: {error}", field="address") from None
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:  # which no NaN is
            raise InvalidRequest(
                f"ttl_s: must be from {MIN_TTL_S:g} to {MAX_TTL_S:g}, got {ttl_s:g}", field="ttl_s"
            )
        is_new = address not in self._ends_at
        if is_new and len(self._ends_at) >= MAX:
            self._expire()
            if len(self._ends_at) >= MAX:
                raise InvalidRequest(
                    f"address: {MAX} instances are registered, and there can be no more; "
                    "deregister one, or name them in TIDEGATE_INSTANCES",
                    field="address",
                )
        self._ends_at[address] = self._clock.now() + ttl_s
        return Registration(address, ttl_s, is_new)

    def deregister(self, address: str) -> bool:
        """Remove an instance, given by URL or name. Returns whether it was registered.

        Idempotent.
        """
        entry = address if address in self._ends_at else self._entry_of(address)
        return entry is not None and self._ends_at.pop(entry, None) is not None

    def _entry_of(self, name: str) -> str | None:
        return next((entry for entry in self._ends_at if name_of(entry) == name), None)

    async def read(self) -> frozenset[str] | None:
        self._expire()
        addresses = frozenset(self._ends_at)
        if addresses == self._told:
            return None
        self._told = addresses
        return addresses

    def _expire(self) -> None:
        now = self._clock.now()
        for address, ends_at in list(self._ends_at.items()):
            if ends_at <= now and not self._is_ready(address):
                del self._ends_at[address]
