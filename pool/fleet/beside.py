"""An orchestrator beside the instances, which follows the pool's list of addresses."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from catalog.errors import StartFailed
from pool.fleet.home import InstanceRecord, PoolHome
from pool.fleet.member import Hooks, ports_of
from pool.fleet.wish import OrchestratorSpec
from pool.process.detached import DetachedProcess, DetachedStarter, Found
from pool.process.ports import free_ports, is_free, require_free
from pool.process.process import UnitProcess
from pool.supervise import Keeping
from pool.units.orchestrator import OrchestratorProcess

_READ_EVERY_S = "0.5"
"""Seconds between two looks at the list of addresses, a small file on this machine."""


class PoolOrchestrator:
    """One orchestrator (``member.PoolUnit``); no orchestrator needs its address."""

    address = ""

    def __init__(
        self,
        home: PoolHome,
        wish: OrchestratorSpec,
        kept_port: int,
        lane_token: str,
        hooks: Hooks,
        heartbeat_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self.name = wish.name
        self.port = wish.port or kept_port
        self._home = home
        self._wish = wish
        self._lane_token = lane_token
        self._hooks = hooks
        self._heartbeat_s = heartbeat_s
        self._warn = warn
        self._inner: OrchestratorProcess | None = None
        self._process: DetachedProcess | None = None

    @property
    def where(self) -> str:
        return "" if self._inner is None else self._inner.where

    async def start(self) -> None:
        self.port = self._choose_port()
        self._hooks.stepped("fits")
        self._inner = self._make()
        await self._inner.start()

    async def attach(self, found: Found) -> None:
        self.port = ports_of(found)[0]
        self._inner = self._make()
        self._process = await DetachedProcess.adopt(self.name, found, self._log)
        self._inner.attach(self._process)

    async def resume(self) -> None:
        assert self._inner is not None, "attach it first"
        await self._inner.resume()

    async def lost(self) -> str:
        assert self._inner is not None, "start it first"
        return await self._inner.lost()

    async def stop(self, drain_s: float) -> None:
        if self._inner is not None:
            await self._inner.stop(drain_s)

    def kill(self) -> None:
        if self._inner is not None:
            self._inner.kill()

    def record(self) -> InstanceRecord:
        record = InstanceRecord(ports=(self.port, 0, 0))
        if self._process is not None and self._process.running:
            record.note(self._process)
        return record

    @property
    def _log(self) -> Path:
        return self._home.logs / f"{self.name}.log"

    def _make(self) -> OrchestratorProcess:
        wish = self._wish
        env = {
            **wish.settings,
            "TIDEGATE_INSTANCES": f"file:{self._home.address_list}",
            "TIDEGATE_DISCOVERY__INTERVAL_S": _READ_EVERY_S,
            "TIDEGATE_SHUTDOWN__GRACE_S": str(wish.drain_s),
            **({"TIDEGATE_LANES__TOKEN": self._lane_token} if self._lane_token else {}),
        }
        keeping = Keeping(self._spawn, self._heartbeat_s, self._hooks.missed)
        return OrchestratorProcess(
            wish.host, self.port, env, log=self._log, warn=self._warn, keeping=keeping
        )

    async def _spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None,
        shm_prefix: str = "",
    ) -> UnitProcess:
        """Start the orchestrator's process detached (``StartProcess``)."""
        facts = {"digest": self._wish.digest, "ports": str(self.port), "host": self._wish.host}
        start = DetachedStarter(self._home.path, self.name, facts, self._hooks.stepped)
        self._process = await start(name, command, env=env, log=log, shm_prefix=shm_prefix)
        self._hooks.stepped("started")
        return self._process

    def _choose_port(self) -> int:
        """The port asked for; otherwise its earlier port, or a free one. Raises ``StartFailed``."""
        host = self._wish.host
        if self._wish.port:
            try:
                require_free(host, self._wish.port, "give another port in [orchestrator]")
            except OSError as error:
                raise StartFailed(str(error)) from error
            return self._wish.port
        return self.port if self.port and is_free(host, self.port) else free_ports(1, host)[0]
