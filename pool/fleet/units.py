"""The units of a pool on this machine. Model, GPUs and ports are resolved before each start."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from catalog.errors import ProvisionError, StartFailed
from catalog.hosts import connect_host
from catalog.paths import MODEL_REPOSITORY
from pool.artifacts.resolve import DEMO, resolve_model
from pool.engines.environments import environment_for
from pool.engines.triton import TritonInstall, TritonPorts, TritonSpec
from pool.fleet.gpus import Gpus
from pool.fleet.home import InstanceRecord
from pool.fleet.specs import (
    CHOSEN,
    ORCHESTRATOR,
    SLOT_MODEL,
    AnySpec,
    InstanceSpec,
    OrchestratorSpec,
)
from pool.preflight.nvml import GpuUnavailable
from pool.process.ports import choose_ports, host_port
from pool.process.proc import environment_of
from pool.process.process import FoundRun, OnStep, clear_remains, find_detached
from pool.supervise import ProcessUnit, UnitOptions
from pool.units.llamacpp import HOST, LlamaCppServer, is_asked_for
from pool.units.orchestrator import OrchestratorProcess
from pool.units.triton import TritonInstance
from worker.settings import SHARED_BY, variable

LANE_TOKEN = "TIDEGATE_WORKER__LANE_TOKEN"
_MODEL_PATH = variable("model_path")
_SERVER = "llamacpp"
"""Label fact that marks a run of llama.cpp's server."""


@dataclass(frozen=True, slots=True)
class PoolMachine:
    """This machine for the units of a pool: creates units, and finds running ones."""

    install: TritonInstall | None
    state_dir: Path
    """Folder with the registered models and engines."""
    logs: Path | None
    """Folder for the units' logs; None: they log to stderr."""
    lane_token: str
    warn: Callable[[str], None]
    home: Path | None = None
    """Folder of a pool whose processes outlive us; None: they end with us."""
    gpus: Gpus | None = None
    """Free memory of GPUs; None: unchecked, because the user named the GPUs."""
    sharing: Callable[[], int] = lambda: 1
    """Number of instances that share the CPU's memory."""
    heartbeat_s: float | None = None
    advertise: str = ""
    """Host name of this machine for orchestrators; empty: the host where Tritons listen."""
    model_repository: Path = MODEL_REPOSITORY

    def options(self, unit: str, on_step: OnStep) -> UnitOptions:
        """Options of the unit that is called ``unit``."""
        return UnitOptions(
            log=self.logs and self.logs / f"{unit}.log",
            warn=self.warn,
            home=self.home,
            heartbeat_s=self.heartbeat_s,
            on_step=on_step,
        )

    def found(self) -> Sequence[FoundRun]:
        """Every running unit of this pool. Cleans up after dead runs."""
        assert self.home is not None
        found = find_detached(self.home)
        clear_remains(self.home, found)
        return found

    def make(self, spec: AnySpec, kept: InstanceRecord | None, on_step: OnStep) -> ProcessUnit:
        """A unit that is not started yet; it uses the chosen ports of ``kept``, if any."""
        ports = (0, 0, 0) if kept is None else kept.ports
        if isinstance(spec, OrchestratorSpec):
            return PoolOrchestrator(self, spec, ports[0], on_step)
        tenancy = Tenancy(self, spec, on_step)
        if (model := self._gguf_of(spec)) is not None:
            return PoolLlamaCpp(tenancy, model, spec.ports.http or ports[0])
        first = (asked or kept for asked, kept in zip(spec.ports, ports, strict=True))
        return PoolTriton(tenancy, TritonPorts(*first))

    def make_former(self, found: FoundRun, on_step: OnStep) -> ProcessUnit:
        """A unit for a running process that matches no spec; use it only to end the process."""
        facts, name = found.label.facts, found.label.unit
        host = facts.get("host", "127.0.0.1")
        if name == ORCHESTRATOR:
            port = found.ports[0]
            return PoolOrchestrator(self, OrchestratorSpec(host, port), port, on_step)
        models = tuple(filter(None, facts.get("models", "").split(",")))
        spec = InstanceSpec(name, model="", host=host, models=models)
        tenancy = Tenancy(self, spec, on_step)
        if facts.get("server") == _SERVER:
            return PoolLlamaCpp(tenancy, None, 0)
        return PoolTriton(tenancy, CHOSEN)

    async def fits_beside(self, spec: AnySpec) -> bool:
        """Whether an instance could start alongside all others, and the one that it replaces."""
        if not isinstance(spec, InstanceSpec) or any(spec.ports) or self.gpus is None:
            return False
        try:
            model = await asyncio.to_thread(resolve_model, spec.model, self.state_dir)
        except ProvisionError:
            return True  # its start will fail with the reason, and the old one stays
        return await self.gpus.fits_beside(spec, model)

    def _gguf_of(self, spec: InstanceSpec) -> Path | None:
        """The model of an instance, if llama.cpp's server runs it; None for a Triton."""
        model = Path(spec.settings.get(_MODEL_PATH, ""))
        with suppress(ProvisionError):
            if spec.model:
                model = resolve_model(spec.model, self.state_dir)
            if spec.models != (SLOT_MODEL,) and is_asked_for(spec.settings, model):
                return model
        return None


@dataclass
class Tenancy:
    """An instance's resources on this machine: a model, GPUs, ports."""

    host: PoolMachine
    spec: InstanceSpec
    on_step: OnStep
    group: tuple[str, ...] = ()
    """The GPUs that it has."""

    @property
    def options(self) -> UnitOptions:
        return self.host.options(self.spec.name, self.on_step)

    @asynccontextmanager
    async def placed(self) -> AsyncIterator[dict[str, str]]:
        """Find the model, and reserve its GPUs while it loads; yields its worker's variables.
        Raises ``StartFailed``, ``ModelNotFound``, ``CatalogUnusable``."""
        host, spec = self.host, self.spec
        model = None
        if spec.model:
            model = await asyncio.to_thread(resolve_model, spec.model, host.state_dir)
        # During a replacement, two instances of the same name each have a reservation.
        who = f"{spec.name} {id(self)}"
        self.group = spec.groups[0]
        if host.gpus is not None and model is not None:
            self.group = await host.gpus.take(who, spec, model)
        self.on_step("fits")
        try:
            yield self.variables(model)
        finally:
            if host.gpus is not None:
                host.gpus.settle(who)

    def variables(self, model: Path | None) -> dict[str, str]:
        """Variables of the worker that serves ``model``; None if the settings have it."""
        return ({_MODEL_PATH: str(model)} if model else {}) | dict(self.spec.settings)

    async def visible(self) -> dict[str, str]:
        """Variables that restrict a process to these GPUs. Raises ``StartFailed``."""
        if not self.group:
            return {}
        if self.host.gpus is None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.group)}
        try:
            visible = await self.host.gpus.visible(self.group)
        except GpuUnavailable as error:
            raise StartFailed(str(error)) from error
        return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def ports(self, host: str, asked: Sequence[int], kept: Sequence[int]) -> list[int]:
        """The requested ports, else the earlier ones or free ones. Raises ``PortInUse``."""
        remedy = f"stop its program, or give {self.spec.name} another port"
        return choose_ports(host, asked, remedy, kept=kept)

    def facts(self, ports: Sequence[int], **more: str) -> dict[str, str]:
        """Facts for the next manager."""
        return {"digest": self.spec.digest, "ports": ",".join(map(str, ports)), **more}


class PoolTriton(TritonInstance):
    """The Triton of one instance."""

    def __init__(self, tenancy: Tenancy, ports: TritonPorts) -> None:
        host, spec = tenancy.host, tenancy.spec
        assert host.install is not None
        served = TritonSpec(
            host.model_repository,
            spec.models,
            host=spec.host,
            load_timeout_s=spec.load_timeout_s,
            lane_token=host.lane_token,
            tls=spec.tls,
        )
        super().__init__(spec.name, host.install, served, ports, **tenancy.options)
        self._tenancy = tenancy

    @property
    def address(self) -> str:
        host = self._tenancy.host.advertise or connect_host(self._spec.host)
        return host_port(host, self.ports.grpc) if self.ports.grpc else ""

    async def start(self) -> None:
        tenancy = self._tenancy
        async with tenancy.placed() as variables:
            asked = tenancy.spec.ports
            self.ports = TritonPorts(*tenancy.ports(self._spec.host, asked, self.ports))
            env = await self._env(variables)
            self._spec = replace(self._spec, env=env, lane_token=tenancy.host.lane_token)
            await super().start()

    async def attach(self, found: FoundRun) -> None:
        token = environment_of(found.guardian.pid).get(LANE_TOKEN, "")
        self._spec = replace(self._spec, lane_token=token)
        await super().attach(found)

    def facts(self) -> dict[str, str]:
        spec = self._tenancy.spec
        return self._tenancy.facts(self.ports, host=spec.host, models=",".join(spec.models))

    async def _env(self, variables: dict[str, str]) -> dict[str, str]:
        tenancy, host = self._tenancy, self._tenancy.host
        env = dict(variables)
        if tenancy.spec.model == DEMO:
            env.setdefault(variable("model_name"), DEMO)
        if len(tenancy.group) > 1 and env.get(variable("engine"), "auto") in ("auto", "vllm"):
            env.setdefault(variable("tensor_parallel"), str(len(tenancy.group)))
        env |= await asyncio.to_thread(environment_for, env, host.state_dir)
        if host.gpus is None or not tenancy.group:
            # Not in the digest: a change in the number of instances must not restart this one.
            env.setdefault(SHARED_BY, str(max(1, host.sharing())))
        return env | await tenancy.visible()


class PoolLlamaCpp(LlamaCppServer):
    """The llama.cpp server of one instance, if its model is a GGUF file."""

    def __init__(self, tenancy: Tenancy, model: Path | None, port: int) -> None:
        host, spec = tenancy.host, tenancy.spec
        variables = tenancy.variables(model)
        super().__init__(
            spec.name, variables, host.state_dir, port, spec.load_timeout_s, **tenancy.options
        )
        self._tenancy = tenancy
        self._told = ""

    @property
    def address(self) -> str:
        """The address since the server's start: the model's file may have gone."""
        if not self._told and self.port and _MODEL_PATH in self._variables:
            with suppress(ValueError):  # the start reports the error
                self._told = super().address
        return self._told

    async def start(self) -> None:
        tenancy = self._tenancy
        async with tenancy.placed() as self._variables:
            (self.port,) = tenancy.ports(HOST, [tenancy.spec.ports.http], [self.port])
            self._environment = await tenancy.visible()
            self._told = ""
            await super().start()

    def facts(self) -> dict[str, str]:
        return self._tenancy.facts([self.port], server=_SERVER)


class PoolOrchestrator(OrchestratorProcess):
    """An orchestrator in front of the instances."""

    def __init__(
        self, host: PoolMachine, spec: OrchestratorSpec, kept_port: int, on_step: OnStep
    ) -> None:
        env = dict(spec.settings)
        if host.home is not None:
            env["TIDEGATE_INSTANCES"] = ""  # the manager registers them
            env["TIDEGATE_SHUTDOWN__GRACE_S"] = str(spec.drain_s)
            env |= {"TIDEGATE_LANES__TOKEN": host.lane_token} if host.lane_token else {}
        super().__init__(
            spec.host,
            spec.port or kept_port,
            env,
            name=spec.name,
            **host.options(spec.name, on_step),
        )
        self.ready_within_s = spec.ready_within_s
        self._spec = spec

    async def start(self) -> None:
        remedy = "stop its program, or set another port"
        (self.port,) = choose_ports(self.host, [self._spec.port], remedy, kept=[self.port])
        self._on_step("fits")
        await super().start()

    def facts(self) -> dict[str, str]:
        return {"digest": self._spec.digest, "ports": str(self.port), "host": self.host}
