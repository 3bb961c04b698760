"""Operating a service: drain it or its instances, swap their models, reload settings.

Changes need an operator's token: the service's admin token or, if it has none, the key in
``TIDEGATE_HOME/operator``, which the service writes for the user that runs it.
"""

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tidegate.deadlines import Deadline, to_seconds
from tidegate.results import Instance, SwapState
from tidegate.transport import HttpCall, Transport

SWAP_S = 900.0
"""Seconds that a swap or a reload may take: a large model takes minutes to load."""

_T = TypeVar("_T")


class DrainState(msgspec.Struct, frozen=True):
    """State of a drain of the orchestrator: ``serving``, ``draining`` or ``drained``."""

    status: str
    live_tasks: int = 0
    queued_tasks: int = 0
    graceful_shutdown_duration_ms: float = 0.0


class Reloaded(msgspec.Struct, frozen=True):
    """Names of the settings that changed, and of those that need a restart to change."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class Operating:
    """Calls for operators of the service, available as ``Client.operating``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def drain(self, grace: Deadline | None = None) -> DrainState:
        """Make the orchestrator refuse new work, and finish running work within ``grace``."""
        return await self._post("/admin/drain", DrainState, _grace(grace))

    async def drain_state(self) -> DrainState:
        """Get the state of the orchestrator's drain."""
        return await self._transport.call(HttpCall("GET", "/admin/drain"), DrainState)

    async def undrain(self) -> DrainState:
        """Make the orchestrator accept new work again."""
        return await self._post("/admin/undrain", DrainState)

    async def drain_instance(self, address: str, grace: Deadline | None = None) -> Instance:
        """Send an instance no new work, and move work that cannot end within ``grace``."""
        return await self._post(f"{_path(address)}/drain", Instance, _grace(grace))

    async def undrain_instance(self, address: str) -> Instance:
        """Send an instance new work again."""
        return await self._post(f"{_path(address)}/undrain", Instance)

    async def swap(
        self,
        address: str,
        model: str = "",
        *,
        name: str = "",
        settings: Mapping[str, str] | None = None,
        grace: Deadline | None = None,
        wait: bool = True,
    ) -> SwapState:
        """Make an instance serve another model: a name that it knows, or a path on its machine,
        which clients call ``name``. Running work finishes within ``grace``. Raises ``ApiError``
        with the code ``swap_failed`` if the model stays.
        """
        asked = {"model": model, "name": name, "settings": dict(settings or {})}
        stated = {key: value for key, value in asked.items() if value}
        body = {"wait": wait, **stated, **_grace(grace)}
        return await self._replace(f"{_path(address)}/swap", body)

    async def reload_instance(
        self, address: str, *, grace: Deadline | None = None, wait: bool = True
    ) -> SwapState:
        """Make an instance reload its model's files. Running work finishes within ``grace``.

        Raises ``ApiError`` with the code ``swap_failed`` if the old model stays.
        """
        body = {"wait": wait, **_grace(grace)}
        return await self._replace(f"{_path(address)}/reload", body, is_idempotent=False)

    async def reload(self) -> Reloaded:
        """Make the service read settings and keys again. Raises ``InvalidRequest``."""
        return await self._post("/admin/reload", Reloaded)

    async def _post(self, path: str, result: type[_T], body: dict[str, Any] | None = None) -> _T:
        return await self._transport.call(HttpCall("POST", path, body or None), result)

    async def _replace(
        self, path: str, body: dict[str, Any], *, is_idempotent: bool = True
    ) -> SwapState:
        call = HttpCall("POST", path, body, is_idempotent=is_idempotent, patience_s=SWAP_S)
        return await self._transport.call(call, SwapState)


def _grace(grace: Deadline | None) -> dict[str, float]:
    return {} if grace is None else {"grace_ms": 1000 * to_seconds(grace)}


def _path(address: str) -> str:
    return f"/v2/instances/{quote(address, safe=':')}"
