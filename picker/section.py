"""The settings of the endpoint picker (docs/gateways.md)."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from catalog.hosts import is_numeric
from orchestrator.instances.addresses import check_entry, is_source
from orchestrator.lanes.endpoint import is_url
from orchestrator.settings.rooms import RoomSection
from worker.environment import Names


class PickerSection(RoomSection):
    """The endpoint picker (``tidegate picker``), which tells a gateway which pod gets a request
    (docs/gateways.md)."""

    table: ClassVar = "picker"

    host: str = "127.0.0.1"
    """Address that the picker listens on. It requires no token: off loopback, let only the gateway
    reach it."""
    port: int = Field(default=9002, ge=0, le=65535)
    """gRPC port for external processing and health checks. With 0, the system chooses a port, and
    the first log line has it."""
    tls_certificate: Path | None = None
    """PEM file with the picker's certificate, for gateways that use TLS. Unset: no TLS. Needs
    ``tls_key``."""
    tls_key: Path | None = None
    """PEM file with the key of ``tls_certificate``."""
    endpoints: Names = ()
    """Pods: ``ip:port``, comma-separated; ``dns:host:port`` for every address of a name (a headless
    service), which is followed."""
    failure_mode: Literal["open", "closed"] = "open"
    """Behavior without any pod's metrics, or for a body over 4 MiB, which is not read.
    ``open``: pick a pod from the routed requests alone. ``closed``: refuse the request."""
    fallbacks: int = Field(default=2, ge=0, le=15)
    """Number of further pods for the gateway to try in order. 0 for gateways that accept only one
    address, such as ``ORIGINAL_DST`` clusters."""

    @field_validator("endpoints")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if is_url(entry):
                raise ValueError(f"expected ip:port, without a scheme, got {entry[:256]!r}")
            check_entry(entry)
            # Gateways take no names here.
            if not is_source(entry) and not is_numeric(entry.rpartition(":")[0].strip("[]")):
                raise ValueError(f"expected an IP address, got {entry}; write dns:{entry}")
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: one is of no use without the other")
        return self
