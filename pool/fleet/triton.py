"""Runs the Triton of one wish, detached: finds its model and measures memory before each start."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.errors import PortInUse, StartFailed
from catalog.hosts import connect_host
from catalog.paths import MODEL_REPOSITORY
from pool.artifacts.resolve import resolve_model
from pool.engines.environments import environment_for
from pool.engines.triton import TritonInstall, TritonPorts, TritonSpec
from pool.fleet.gpus import Gpus
from pool.fleet.home import InstanceRecord, PoolHome
from pool.fleet.member import Hooks, ports_of
from pool.fleet.wish import CHOSEN, InstanceSpec
from pool.preflight.nvml import GpuUnavailable
from pool.process.detached import DetachedProcess, DetachedStarter, Found
from pool.process.ports import free_ports, host_port, is_free
from pool.process.process import UnitProcess
from pool.supervise import Keeping, first_of
from pool.units.triton import TritonInstance
from worker.engine_choice import is_gguf

_PORT_ATTEMPTS = 5
_DEMO = "demo"
LANE_TOKEN = "TIDEGATE_WORKER__LANE_TOKEN"
_ENGINE = "TIDEGATE_WORKER__ENGINE"
_TENSOR_PARALLEL = "TIDEGATE_WORKER__TENSOR_PARALLEL"


@dataclass(frozen=True, slots=True)
class TritonHost:
    """The facts that all Tritons of a pool share."""

    home: PoolHome
    state_dir: Path
    """Folder with the registered models."""
    install: Callable[[], TritonInstall]
    lane_token: str
    gpus: Gpus
    sharing: Callable[[], int]
    """How many instances share the CPU's memory."""
    heartbeat_s: float
    warn: Callable[[str], None]
    advertise: str = ""
    """Host by which orchestrators reach this machine; empty: the one where Tritons listen."""


class PoolTriton:
    """The Triton of one instance (``member.PoolUnit``)."""

    def __init__(
        self, host: TritonHost, wish: InstanceSpec, kept: TritonPorts, hooks: Hooks
    ) -> None:
        self.name = wish.name
        self.ports = kept
        self._host = host
        self._wish = wish
        self._hooks = hooks
        self._group: tuple[str, ...] = ()
        self._lane_token = host.lane_token
        self._triton: TritonInstance | None = None
        self._process: DetachedProcess | None = None

    @property
    def address(self) -> str:
        host = self._host.advertise or connect_host(self._wish.host)
        return host_port(host, self.ports.grpc) if self.ports.grpc else ""

    @property
    def where(self) -> str:
        return f"gRPC on {self.address}"

    async def start(self) -> None:
        host, wish = self._host, self._wish
        self._lane_token = host.lane_token
        model = await asyncio.to_thread(resolve_model, wish.model, host.state_dir)
        # Two instances of one name, while one replaces the other, each have a reservation.
        who = f"{self.name} {id(self)}"
        self._group = await host.gpus.take(who, wish, model)
        self._hooks.stepped("fits")
        try:
            for attempts_left in reversed(range(_PORT_ATTEMPTS)):
                self.ports = self._choose_ports()
                self._triton = self._make(await self._env(model))
                try:
                    await self._triton.start()
                    return
                except StartFailed:
                    if not attempts_left or self._ports_are_ours():
                        raise
                    await self._triton.stop(0.0)
                    self.ports = wish.ports  # another program has them now: choose again
        finally:
            host.gpus.settle(who)

    async def attach(self, found: Found) -> None:
        self.ports = TritonPorts(*ports_of(found))
        group = found.label.facts.get("devices", "")
        self._group = tuple(group.split(",")) if group else ()
        self._lane_token = found.variable(LANE_TOKEN)
        self._triton = self._make({})
        self._process = await DetachedProcess.adopt(self.name, found, self._log)
        self._triton.attach(self._process, found.label.mark)

    async def resume(self) -> None:
        assert self._triton is not None, "attach it first"
        await self._triton.resume()

    async def lost(self) -> str:
        assert self._triton is not None, "start it first"
        return await first_of(self._triton.lost(), self._host.gpus.lost(self._group))

    async def stop(self, drain_s: float) -> None:
        if self._triton is not None:
            await self._triton.stop(drain_s)

    def kill(self) -> None:
        if self._triton is not None:
            self._triton.kill()

    def record(self) -> InstanceRecord:
        record = InstanceRecord(ports=(self.ports.http, self.ports.grpc, self.ports.metrics))
        if self._process is not None and self._process.running:
            record.note(self._process)
        return record

    @property
    def _log(self) -> Path:
        return self._host.home.logs / f"{self.name}.log"

    def _make(self, env: dict[str, str]) -> TritonInstance:
        host, wish = self._host, self._wish
        keeping = Keeping(self._spawn, host.heartbeat_s, self._hooks.missed)
        spec = TritonSpec(
            MODEL_REPOSITORY,
            wish.models,
            host=wish.host,
            load_timeout_s=wish.load_timeout_s,
            env=env,
            lane_token=self._lane_token,
            tls=wish.tls,
        )
        return TritonInstance(
            self.name,
            host.install(),
            spec,
            self.ports,
            log=self._log,
            warn=host.warn,
            keeping=keeping,
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
        """Start the server's process detached (``StartProcess``)."""
        facts = {
            "digest": self._wish.digest,
            "ports": f"{self.ports.http},{self.ports.grpc},{self.ports.metrics}",
            "host": self._wish.host,
            "models": ",".join(self._wish.models),
            "devices": ",".join(self._group),
        }
        start = DetachedStarter(self._host.home.path, self.name, facts, self._hooks.stepped)
        self._process = await start(name, command, env=env, log=log, shm_prefix=shm_prefix)
        self._hooks.stepped("started")
        return self._process

    async def _env(self, model: Path) -> dict[str, str]:
        env = {"TIDEGATE_WORKER__MODEL_PATH": str(model)}
        if self._wish.model == _DEMO:
            env["TIDEGATE_WORKER__MODEL_NAME"] = _DEMO
        env |= self._wish.settings
        if len(self._group) > 1 and self._is_split(env.get(_ENGINE, "auto"), model):
            env.setdefault(_TENSOR_PARALLEL, str(len(self._group)))
        env |= await asyncio.to_thread(environment_for, env, self._host.state_dir)
        if self._group:
            try:
                visible = await self._host.gpus.ledger.visible(self._group)
            except GpuUnavailable as error:
                raise StartFailed(str(error)) from error
            return env | {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        # Not part of the digest: how many share the memory is no reason to start an instance anew.
        return env | {"TIDEGATE_WORKER__INSTANCES": str(max(1, self._host.sharing()))}

    @staticmethod
    def _is_split(engine: str, model: Path) -> bool:
        """Whether vLLM is to split the model over a group of GPUs. llama.cpp spreads models by
        itself."""
        return engine == "vllm" or (engine == "auto" and not is_gguf(model))

    def _choose_ports(self) -> TritonPorts:
        """The next start's ports: fixed or kept ones, otherwise free ones. Raises ``PortInUse``."""
        asked, kept, host = self._wish.ports, self.ports, self._wish.host
        named = {asked.http, asked.grpc, asked.metrics, kept.http, kept.grpc, kept.metrics}
        free = iter(free_ports(3, host, named))

        def choose(fixed: int, before: int) -> int:
            if fixed:
                return fixed
            return before if before and is_free(host, before) else next(free)

        ports = TritonPorts(
            choose(asked.http, kept.http),
            choose(asked.grpc, kept.grpc),
            choose(asked.metrics, kept.metrics),
        )
        for port in (asked.http, asked.grpc, asked.metrics):
            if port and not is_free(host, port):
                raise PortInUse(
                    f"{host_port(host, port)} is taken by another program: end that, or give "
                    f"{self.name} another port"
                )
        return ports

    def _ports_are_ours(self) -> bool:
        """Whether no other program took the ports meanwhile; ask when nothing of ours runs."""
        ports = self.ports
        return all(is_free(self._wish.host, p) for p in (ports.http, ports.grpc, ports.metrics))


def former(found: Found, host: TritonHost, hooks: Hooks) -> PoolTriton:
    """The unit of a running process that is not asked for as it is: good for ending it."""
    facts = found.label.facts
    wish = InstanceSpec(
        name=found.label.unit,
        model="",
        host=facts.get("host", "127.0.0.1"),
        models=tuple(filter(None, facts.get("models", "").split(","))),
    )
    return PoolTriton(host, wish, CHOSEN, hooks)
