"""Runs the orchestrator as a child process, so that a crash of one does not end the other."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple, Unpack

from catalog.errors import StartFailed
from catalog.hosts import connect_host
from orchestrator.api.health_port.responder import STALLED_AFTER_S
from pool.process.http_get import get, http_status
from pool.process.ports import host_port
from pool.process.process import FoundRun, command_environment
from pool.supervise import ProcessUnit, UnitOptions

_STARTING = b'{"status":"starting"}'
"""Answer of an orchestrator that still reads its journal; a large journal takes long."""
_POLL_S = 0.03


class Address(NamedTuple):
    """Network address of a process."""

    host: str
    port: int


class OrchestratorProcess(ProcessUnit):
    """``python -m orchestrator`` under supervision.

    If it dies, it is restarted on its port. Its lanes close with it, so the workers drop its jobs.
    Clients get a connection error that they can retry. Modules in the working directory are never
    imported (``-P``).
    """

    def __init__(
        self,
        host: str,
        port: int,
        env: Mapping[str, str],
        command: tuple[str, ...] = (sys.executable, "-P", "-m", "orchestrator"),
        *,
        name: str = "orchestrator",
        **options: Unpack[UnitOptions],
    ) -> None:
        super().__init__(name, **options)
        self.host = host
        self.port = port
        self.ready_within_s: float | None = None
        """Seconds until it must be ready for work at its first start; None: no check."""
        self._env = env
        self._command = command

    @property
    def all_ports(self) -> tuple[int, int, int]:
        return self.port, 0, 0

    @property
    def url(self) -> str:
        """Base address for clients on this machine."""
        return f"http://{host_port(*self._public)}"

    @property
    def where(self) -> str:
        return f"HTTP on {host_port(*self._public)}"

    async def start(self) -> None:
        """Start it and wait until it answers. Raises ``StartFailed`` with its last log lines."""
        listening = {"TIDEGATE_HOST": self.host, "TIDEGATE_PORT": str(self.port)}
        await self._spawn(self._command, command_environment({**self._env, **listening}))
        await self.resume()
        within_s, self.ready_within_s = self.ready_within_s, None
        if within_s is not None:
            for warning in await self.wait_ready(within_s):
                self._warn(f"{warning}; plain prompts are served, chats are refused")

    async def attach(self, found: FoundRun) -> None:
        self.port = found.ports[0]
        await super().attach(found)

    async def resume(self) -> None:
        await self._wait_for("/health/live", self.start_s)

    async def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait until it can accept work, with its instances connected. Returns sentences about
        models that cannot be served although it is ready. It does not wait for a model that can
        never be served. Raises ``StartFailed``."""
        body = await self._wait_for("/health/ready", timeout_s)
        return sorted({i["chat_fault"] for i in _instances(body) if i.get("chat_fault")})

    async def stop(self, drain_s: float) -> None:
        """Send SIGTERM (it finishes or refuses its work), and SIGKILL after ``drain_s`` and 1 s."""
        if drain_s > 0 and self._process is not None:
            await self._process.end(drain_s + 1.0)
        await super().stop(drain_s)

    @property
    def _public(self) -> Address:
        """Address for local clients."""
        return Address(connect_host(self.host), self.port)

    async def _answers(self) -> bool:
        return await http_status(*self._public, "/health/live", STALLED_AFTER_S) == 200

    async def _wait_for(self, path: str, timeout_s: float) -> bytes:
        """Wait for the first 200 and return its body. Raises ``StartFailed``."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while True:
            status, body = await get(*self._public, path)
            if body == _STARTING:
                await asyncio.sleep(_POLL_S)
                deadline = time.monotonic() + timeout_s
                continue
            if status == 200:
                return body
            if not self._process.running:
                raise self._failure(await self._status())
            instances = _instances(body)
            faults = sorted({i["fault"] for i in instances if i.get("fault")})
            if faults:
                raise StartFailed(f"{self.name}: no model can be served: {'; '.join(faults)}")
            if time.monotonic() > deadline:
                answer = f"HTTP {status}" if status else "no answer"
                reasons = "".join(f"\n{i.get('address')}: {i.get('reason')}" for i in instances)
                raise self._failure(
                    f"still gave {answer} to {path} after {timeout_s:.0f} s{reasons}"
                )
            await asyncio.sleep(_POLL_S)


def _instances(body: bytes) -> list[dict[str, str]]:
    """The instances in an answer of ``/health/ready``; empty for any other body."""
    try:
        answer = json.loads(body)
        instances = answer["instances"]
    except (ValueError, KeyError, TypeError):
        return []
    return [instance for instance in instances if isinstance(instance, dict)]
