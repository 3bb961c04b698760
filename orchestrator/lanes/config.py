"""Settings of lanes."""

from typing import Annotated, Final

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from orchestrator.tls import Tls, stated_tls
from worker.environment import Section

OPEN_TIMEOUT_S: Final = 5.0
"""Maximum seconds to open a lane, or for one query to another kind of server."""
RENEW_AFTER_BYTES: Final = 64 * 2**20
"""Traffic after which a lane is replaced: Triton (24.10) keeps a stream's answers until it ends."""
SUSPECT_AFTER_S: Final = 1.0
"""Seconds without a frame after which an instance gets no new work (OR-6)."""
DOWN_AFTER_S: Final = 3.0
"""Seconds without a frame after which an instance's work is lost (OR-6)."""


class LaneConfig(Section):
    """Lanes: the connections to Triton instances that carry jobs."""

    token: SecretStr | None = None
    """Token shown to workers that ask for one (``TIDEGATE_WORKER__LANE_TOKEN``). ``tidegate up``
    generates one for both sides."""
    tls: Annotated[Tls | None, NoDecode] = None
    """TLS for every connection to Triton: ``[lanes.tls]`` in tidegate.toml, JSON in the
    environment, or a variable for each field, with ``ca``, ``certificate`` and ``key`` (mutual
    TLS), ``server_name``; ``{}`` for the system's own TLS settings."""
    per_instance: int = Field(default=1, ge=1, le=10)
    """Lanes to each instance (LB-5)."""
    keepalive_s: float = Field(default=60.0, gt=0)
    """Silence after which a lane is probed, so that proxies keep it open (LB-5)."""

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value is not None and value.get_secret_value() else None

    @field_validator("tls", mode="before")
    @classmethod
    def _stated_tls(cls, value: object) -> object:
        return stated_tls(value) if isinstance(value, str) else value

    @property
    def shown_token(self) -> str:
        """``token`` for workers; empty if unset."""
        return "" if self.token is None else self.token.get_secret_value()
