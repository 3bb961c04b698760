"""The room's settings."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SecretStr, field_validator

from catalog.hosts import is_wildcard
from orchestrator.settings.rooms import RoomSection

if TYPE_CHECKING:
    from orchestrator.settings import Settings


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
    def keeps_durable_tasks(self) -> bool:
        return self.url is not None

    def check(self, settings: "Settings") -> None:
        if self.is_remote and self.advertise is None and is_wildcard(settings.host):
            raise ValueError(
                "state.advertise: must be set, because the orchestrator listens on all addresses "
                f"({settings.host}): set the http://host:port at which the others reach it"
            )
