"""Runs one instance's Triton, detached: finds its model, measures memory before each start."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from catalog.errors import StartFailed
from catalog.hosts import connect_host
from catalog.paths import MODEL_REPOSITORY
from pool.artifacts.resolve import resolve_model
from pool.engines.environments import environment_for
from pool.engines.triton import TritonInstall, TritonPorts, TritonSpec
from pool.fleet.gpus import Gpus
from pool.fleet.home import InstanceRecord, PoolHome
from pool.fleet.member import OnStep, ports_of
from pool.fleet.specs import CHOSEN, InstanceSpec
from pool.preflight.nvml import GpuUnavailable
from pool.process.detached import DetachedProcess, DetachedStarter, Found
from pool.process.ports import free_ports, host_port, is_free, require_free
from pool.supervise import Keeping, first_of
from pool.units.triton import TritonInstance
from worker.settings import SHARED_BY

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
    install: TritonInstall
    lane_token: str
    gpus: Gpus
    sharing: Callable[[], int]
    """How many instances share the CPU's memory."""
    heartbeat_s: float
    warn: Callable[[str], None]
    advertise: str = ""
    """Host by which orchestrators reach this machine; empty: the one where Tritons listen."""


class PoolTriton(TritonInstance):
    """The Triton of one instance (``member.PoolUnit``)."""

    def __init__(
        self, host: TritonHost, spec: InstanceSpec, kept: TritonPorts, on_step: OnStep
    ) -> None:
        start = DetachedStarter(host.home.path, spec.name, self._facts, on_step)
        server = TritonSpec(
            MODEL_REPOSITORY,
            spec.models,
            host=spec.host,
            load_timeout_s=spec.load_timeout_s,
            lane_token=host.lane_token,
            tls=spec.tls,
        )
        super().__init__(
            spec.name,
            host.install,
            server,
            kept,
            log=host.home.logs / f"{spec.name}.log",
            warn=host.warn,
            keeping=Keeping(start, host.heartbeat_s, lambda: on_step("started")),
        )
        self._host = host
        self._wanted = spec
        self._on_step = on_step
        self._group: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        host = self._host.advertise or connect_host(self._wanted.host)
        return host_port(host, self.ports.grpc) if self.ports.grpc else ""

    @property
    def where(self) -> str:
        return f"gRPC on {self.address}"

    async def start(self) -> None:
        host, spec = self._host, self._wanted
        model = await asyncio.to_thread(resolve_model, spec.model, host.state_dir)
        # Two instances of one name, while one replaces the other, each have a reservation.
        who = f"{self.name} {id(self)}"
        self._group = await host.gpus.take(who, spec, model)
        self._on_step("fits")
        try:
            self.ports = self._choose_ports()  # a start that finds one taken is followed by another
            env = await self._env(model)
            self._spec = replace(self._spec, env=env, lane_token=host.lane_token)
            await super().start()
        finally:
            host.gpus.settle(who)

    async def attach(self, found: Found) -> None:
        self.ports = TritonPorts(*ports_of(found))
        group = found.label.facts.get("devices", "")
        self._group = tuple(group.split(",")) if group else ()
        self._spec = replace(self._spec, lane_token=found.variable(LANE_TOKEN))
        self._server_id = found.label.mark
        self._process = await DetachedProcess.adopt(self.name, found, self._log)

    async def lost(self) -> str:
        return await first_of(super().lost(), self._host.gpus.lost(self._group))

    def record(self) -> InstanceRecord:
        return InstanceRecord.of(self.ports, self._process)

    def _facts(self) -> dict[str, str]:
        return {
            "digest": self._wanted.digest,
            "ports": ",".join(map(str, self.ports)),
            "host": self._wanted.host,
            "models": ",".join(self._wanted.models),
            "devices": ",".join(self._group),
        }

    async def _env(self, model: Path) -> dict[str, str]:
        env = {"TIDEGATE_WORKER__MODEL_PATH": str(model)}
        if self._wanted.model == _DEMO:
            env["TIDEGATE_WORKER__MODEL_NAME"] = _DEMO
        env |= self._wanted.settings
        if len(self._group) > 1 and env.get(_ENGINE, "auto") in ("auto", "vllm"):
            env.setdefault(_TENSOR_PARALLEL, str(len(self._group)))
        env |= await asyncio.to_thread(environment_for, env, self._host.state_dir)
        if self._group:
            return env | await visible_gpus(self._host, self._group)
        # Not part of the digest: how many share the memory is no reason to start an instance anew.
        return env | {SHARED_BY: str(max(1, self._host.sharing()))}

    def _choose_ports(self) -> TritonPorts:
        """The next start's ports: fixed or kept ones, otherwise free ones. Raises ``PortInUse``."""
        asked, kept, host = self._wanted.ports, self.ports, self._wanted.host
        for port in filter(None, asked):
            require_free(host, port, f"end what has it, or give {self.name} another port")
        free = iter(free_ports(3, host, {*asked, *kept}))
        return TritonPorts(
            *(
                fixed or (before if before and is_free(host, before) else next(free))
                for fixed, before in zip(asked, kept, strict=True)
            )
        )


async def visible_gpus(host: TritonHost, group: Sequence[str]) -> dict[str, str]:
    """Variables by which a process sees these GPUs and no others. Raises ``StartFailed``."""
    if not group:
        return {}
    try:
        visible = await host.gpus.ledger.visible(group)
    except GpuUnavailable as error:
        raise StartFailed(str(error)) from error
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def former(found: Found, host: TritonHost, on_step: OnStep) -> PoolTriton:
    """The unit of a running process that is not asked for as it is: good for ending it."""
    facts = found.label.facts
    spec = InstanceSpec(
        name=found.label.unit,
        model="",
        host=facts.get("host", "127.0.0.1"),
        models=tuple(filter(None, facts.get("models", "").split(","))),
    )
    return PoolTriton(host, spec, CHOSEN, on_step)
