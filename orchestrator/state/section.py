"""The room's settings."""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PrivateAttr, SecretStr, field_validator

from catalog.hosts import is_wildcard
from catalog.paths import OWN_ADDRESS
from orchestrator.instances.addresses import check_address
from orchestrator.settings.rooms import RoomSection

if TYPE_CHECKING:
    from orchestrator.settings import Settings


def _own_address() -> str | None:
    address = os.environ.get(OWN_ADDRESS)
    if address:
        check_address(address)
    return address or None


class StateSection(RoomSection):
    """State that several orchestrators share in a Redis or Valkey server (OR-18)."""

    table: ClassVar = "state"

    url: SecretStr | None = None
    """Store that several orchestrators share, also for durable tasks:
    ``redis://user:password@host:port/db``, ``rediss://…`` with TLS, or ``unix://path``. Needs the
    extra ``fleet``. Unset: this orchestrator shares no state."""
    prefix: str = Field(default="tidegate", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Prefix of all names in the store. Orchestrators that share a state have the same prefix."""
    advertise: str | None = Field(default=None, pattern=r"^https?://[^/\s?#@]+$")
    """Address at which the other orchestrators reach this one: ``http://host:port``. Unset: its
    listening address, which must not be a wildcard."""
    _own_address: str | None = PrivateAttr(default_factory=_own_address)

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        scheme = value.get_secret_value().partition("://")[0]
        if scheme not in ("redis", "rediss", "unix"):
            raise ValueError("expected redis://…, rediss://… or unix://…")
        if find_spec("redis") is None:
            raise ValueError("the package redis is not installed; run pip install redis")
        return value

    @property
    def is_remote(self) -> bool:
        """Whether orchestrators on other machines may use the store."""
        return self.url is not None and not self.url.get_secret_value().startswith("unix:")

    @property
    def own_address(self) -> str | None:
        return self._own_address

    @property
    def own(self) -> tuple[str, int] | None:
        """Host and port at which only this process listens, if it shares ``port`` with other
        processes on this machine (``SO_REUSEPORT``); None if ``port`` is its own."""
        if self._own_address is None:
            return None
        host, _, port = self._own_address.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def keeps_durable_tasks(self) -> bool:
        return self.url is not None

    def check(self, settings: "Settings") -> None:
        if self.own is not None and (self.url is None or not settings.port):
            raise ValueError(
                f"{OWN_ADDRESS}: processes that share a port also share a state: set state.url and "
                "port"
            )
        listens = settings.host if self.own is None else self.own[0]
        if self.is_remote and self.advertise is None and is_wildcard(listens):
            raise ValueError(
                "state.advertise: must be set, because the orchestrator listens on all addresses "
                f"({listens}): set the http://host:port at which the others reach it"
            )
