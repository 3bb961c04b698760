"""The room's settings."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, SecretStr, field_validator

from catalog.hosts import is_wildcard
from orchestrator.instances.discovery.addresses import check_address
from orchestrator.settings.room_section import RoomSection
from worker.environment import HIDDEN

if TYPE_CHECKING:
    from orchestrator.settings import Settings


class StateSection(RoomSection):
    """What several orchestrators share, in a Redis or Valkey server (OR-18)."""

    table: ClassVar = "state"

    url: SecretStr | None = None
    """Store that several orchestrators share: ``redis://user:password@host:port/db``,
    ``rediss://…`` with TLS, or ``unix://path``; needs the extra ``fleet``. Unset: this orchestrator
    is alone. Durable tasks are kept there then, not in the journal's file."""
    prefix: str = Field(default="tidegate", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What all names in the store begin with: one for all orchestrators that share a state."""
    advertise: str | None = Field(default=None, pattern=r"^https?://[^/\s?#@]+$")
    """Address at which the other orchestrators reach this one: ``http://host:port``. Unset: the one
    that it listens on, which must then not be a wildcard."""
    own_address: Annotated[str | None, HIDDEN] = None
    """``host:port`` at which this process alone listens, while it shares ``port`` with others on
    this machine (``SO_REUSEPORT``). Set for each process by ``--processes`` of ``tidegate up`` and
    ``tidegate serve``. Unset: ``port`` is its own."""
    lease_s: Annotated[float, HIDDEN] = Field(default=5.0, ge=0.5, le=60)
    """Time after which an orchestrator that is not heard of is taken for dead, and its durable
    tasks are taken on by the others."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        scheme = value.get_secret_value().partition("://")[0]
        if scheme not in ("redis", "rediss", "unix"):
            raise ValueError("expected redis://…, rediss://… or unix://…")
        if find_spec("redis") is None:
            raise ValueError("needs the package redis, which is not installed: pip install redis")
        return value

    @field_validator("own_address")
    @classmethod
    def _check_own_address(cls, value: str | None) -> str | None:
        if value:
            check_address(value)
        return value or None

    @property
    def is_remote(self) -> bool:
        """Whether orchestrators on other machines may use the store."""
        return self.url is not None and not self.url.get_secret_value().startswith("unix:")

    @property
    def own(self) -> tuple[str, int] | None:
        """Host and port of ``own_address``."""
        if self.own_address is None:
            return None
        host, _, port = self.own_address.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def keeps_durable_tasks(self) -> bool:
        return self.url is not None

    def check(self, settings: "Settings") -> None:
        if self.own is not None and (self.url is None or not settings.port):
            raise ValueError(
                "state.own_address: needs state.url and a port: processes that share a port share "
                "a state"
            )
        listens = settings.host if self.own is None else self.own[0]
        if self.is_remote and self.advertise is None and is_wildcard(listens):
            raise ValueError(
                "state.advertise: must be set where the orchestrator listens on all addresses "
                f"({listens}), so that others know where to reach it: http://host:port"
            )
