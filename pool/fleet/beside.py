"""An orchestrator beside the instances, which follows the pool's list of addresses."""

from collections.abc import Callable

from catalog.errors import StartFailed
from pool.fleet.home import InstanceRecord, PoolHome
from pool.fleet.member import OnStep, ports_of
from pool.fleet.specs import OrchestratorSpec
from pool.process.detached import DetachedProcess, DetachedStarter, Found
from pool.process.ports import free_ports, is_free, require_free
from pool.supervise import Keeping
from pool.units.orchestrator import OrchestratorProcess


class PoolOrchestrator(OrchestratorProcess):
    """One orchestrator (``member.PoolUnit``); no orchestrator needs its address."""

    address = ""

    def __init__(
        self,
        home: PoolHome,
        spec: OrchestratorSpec,
        kept_port: int,
        lane_token: str,
        on_step: OnStep,
        heartbeat_s: float,
        warn: Callable[[str], None],
    ) -> None:
        env = {
            **spec.settings,
            "TIDEGATE_INSTANCES": f"file:{home.address_list}",
            "TIDEGATE_SHUTDOWN__GRACE_S": str(spec.drain_s),
            **({"TIDEGATE_LANES__TOKEN": lane_token} if lane_token else {}),
        }
        start = DetachedStarter(home.path, spec.name, self._facts, on_step)
        super().__init__(
            spec.host,
            spec.port or kept_port,
            env,
            log=home.logs / f"{spec.name}.log",
            warn=warn,
            keeping=Keeping(start, heartbeat_s, lambda: on_step("started")),
        )
        self._spec = spec
        self._on_step = on_step

    async def start(self) -> None:
        self._listen_at(self._choose_port())
        self._on_step("fits")
        await super().start()

    async def attach(self, found: Found) -> None:
        self._listen_at(ports_of(found)[0])
        self._process = await DetachedProcess.adopt(self.name, found, self._log)

    def record(self) -> InstanceRecord:
        return InstanceRecord.of((self.port, 0, 0), self._process)

    def _listen_at(self, port: int) -> None:
        self.port = port
        self.asked_at = self._public

    def _facts(self) -> dict[str, str]:
        spec = self._spec
        return {"digest": spec.digest, "ports": str(self.port), "host": spec.host}

    def _choose_port(self) -> int:
        """The port asked for; otherwise its earlier port, or a free one. Raises ``StartFailed``."""
        host = self._spec.host
        if self._spec.port:
            try:
                require_free(host, self._spec.port, "give another port in [orchestrator]")
            except OSError as error:
                raise StartFailed(str(error)) from error
            return self._spec.port
        return self.port if self.port and is_free(host, self.port) else free_ports(1, host)[0]
