"""What a body may say of when and where a task runs, the same in every dialect (OR-2)."""

import re
from dataclasses import dataclass
from typing import Protocol

import msgspec

from orchestrator.api.auth import Key
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.task import PlacementMode, PlacementWish, Priority

MAX_INSTANCES = 64
MAX_INSTANCE_CHARS = 256
"""A host's name has at most 253; what is stated is kept with the task."""
_NAME = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}", re.ASCII)
"""What may travel in headers, logs and metrics; as correlation ids."""


class PlacementBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``instances`` are named as ``/health`` names them."""

    mode: PlacementMode = PlacementMode.AUTO
    instances: list[str] = []


class Stated(Protocol):
    """The fields of a body that are read here."""

    @property
    def priority(self) -> Priority: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def session_id(self) -> str | None: ...
    @property
    def placement(self) -> PlacementBody | None: ...


@dataclass(frozen=True, slots=True)
class Wishes:
    """These fields as a job has them."""

    priority: Priority
    tenant: str
    session_id: str
    placement: PlacementWish


def read_wishes(body: Stated, key: Key) -> Wishes:
    """Of a request that came with ``key``. Raises ``InvalidRequest`` or ``Forbidden``."""
    stated = None if body.tenant is None else _name("tenant", body.tenant)
    return Wishes(
        priority=body.priority,
        tenant=key.tenant_for(stated),
        session_id="" if body.session_id is None else _name("session_id", body.session_id),
        placement=PlacementWish() if body.placement is None else _placement(body.placement),
    )


def _name(field: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{field} must be 1 to 128 letters, digits or any of . _ : @ / + = -", field=field
        )
    return value


def _placement(body: PlacementBody) -> PlacementWish:
    if body.mode is PlacementMode.AUTO and body.instances:
        raise InvalidRequest(
            "placement.instances needs a placement.mode: pin, prefer or avoid",
            field="placement.mode",
        )
    if body.mode is not PlacementMode.AUTO and not 0 < len(body.instances) <= MAX_INSTANCES:
        raise InvalidRequest(
            f"placement.mode {body.mode} needs 1 to {MAX_INSTANCES} placement.instances",
            field="placement.instances",
        )
    if any(not 0 < len(name) <= MAX_INSTANCE_CHARS for name in body.instances):
        raise InvalidRequest(
            f"each of placement.instances must have 1 to {MAX_INSTANCE_CHARS} characters",
            field="placement.instances",
        )
    return PlacementWish(body.mode, tuple(body.instances))
