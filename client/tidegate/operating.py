"""Operating a service: instances out of use and back, itself drained, its settings read anew.

Every call needs an operator's token where the service has one.
"""

from typing import TypeVar
from urllib.parse import quote

import msgspec

from tidegate.deadlines import Deadline, to_seconds
from tidegate.listings import Instance
from tidegate.transport import Call, Transport

_ADMIN = {"X-Tidegate-Admin": "1"}
"""Where a service has no tokens: a page in a browser cannot send it unasked."""


_T = TypeVar("_T")


class DrainState(msgspec.Struct, frozen=True):
    """How far a drain of the orchestrator is: ``serving``, ``draining`` or ``drained``."""

    status: str
    live_tasks: int = 0
    queued_tasks: int = 0
    graceful_shutdown_duration_ms: float = 0.0


class Reloaded(msgspec.Struct, frozen=True):
    """Names of the settings that changed, and of those that would need a restart to."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class Operating:
    """``Client.operating``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def drain(self, grace: Deadline | None = None) -> DrainState:
        """Have the orchestrator refuse new work, and finish what runs within ``grace``."""
        return await self._post("/admin/drain", DrainState, _grace(grace))

    async def drain_state(self) -> DrainState:
        """How far that is."""
        return await self._transport.call(Call("GET", "/admin/drain", headers=_ADMIN), DrainState)

    async def undrain(self) -> DrainState:
        """Have it take new work again."""
        return await self._post("/admin/undrain", DrainState)

    async def drain_instance(self, address: str, grace: Deadline | None = None) -> Instance:
        """Give an instance no new work; what will not end within ``grace`` is moved elsewhere."""
        return await self._post(f"{_path(address)}/drain", Instance, _grace(grace))

    async def undrain_instance(self, address: str) -> Instance:
        """Give it new work again."""
        return await self._post(f"{_path(address)}/undrain", Instance)

    async def reload(self) -> Reloaded:
        """Have settings and keys read anew. Raises ``InvalidRequest`` where they do not fit."""
        return await self._post("/admin/reload", Reloaded)

    async def _post(self, path: str, result: type[_T], body: dict[str, float] | None = None) -> _T:
        return await self._transport.call(Call("POST", path, body, _ADMIN), result)


def _grace(grace: Deadline | None) -> dict[str, float] | None:
    return None if grace is None else {"grace_ms": 1000 * to_seconds(grace)}


def _path(address: str) -> str:
    return f"/v2/instances/{quote(address, safe=':')}"
