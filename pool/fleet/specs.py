"""The wanted configuration of a pool, from its file: instances, orchestrators, a store."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from orchestrator.tls import SETTING, Tls, spell_tls
from pool.engines.triton import TritonPorts
from pool.pool_file import InstanceSettings, PoolFile
from pool.process.ports import PORT_STRIDE
from pool.units.orchestrator import Address
from worker.environment import variable_of
from worker.settings import variable

MODELS = ("llm",)
"""The models in the model repository that a pool's Triton loads."""
SLOT_MODEL = "slot"
ORCHESTRATOR = "orchestrator"
CHOSEN = TritonPorts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """The wanted configuration of an instance. A different ``digest`` needs a new instance."""

    name: str
    model: str
    """The model's name or path, resolved at each start; empty if ``settings`` has it."""
    groups: tuple[tuple[str, ...], ...] = ((),)
    """GPUs to run on: the first group that is usable. An empty group means the CPU."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the worker by variable: ``TIDEGATE_WORKER__…``."""
    ports: TritonPorts = CHOSEN
    """The ports of its Triton; 0 asks for a free port."""
    host: str = "127.0.0.1"
    vram_gib: float | None = None
    load_timeout_s: float = 300.0
    models: tuple[str, ...] = MODELS
    tls: Tls | None = None

    @property
    def on_gpu(self) -> bool:
        return bool(self.groups[0])

    @property
    def has_own_ports(self) -> bool:
        """Whether it can run at the same time as the instance that it replaces."""
        return not any(self.ports)

    @property
    def digest(self) -> str:
        """Digest of all fields whose change needs a new process; the load timeout is not one."""
        told = (self.name, self.model, self.groups[0], sorted(self.settings.items()))
        more = (*self.ports, self.host, self.models, *([spell_tls(self.tls)] if self.tls else []))
        return _digest((told, more))


@dataclass(frozen=True, slots=True)
class OrchestratorSpec:
    """The wanted configuration of an orchestrator in front of the instances."""

    host: str
    port: int
    """The orchestrator's port; 0 asks for a free port."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the orchestrator by variable: ``TIDEGATE_…``."""
    drain_s: float = 0.0
    name: str = ORCHESTRATOR
    own: Address | None = None
    """Its own address, if several orchestrators share the port."""
    ready_within_s: float | None = None
    has_own_ports: bool = False
    """Always false: clients know the orchestrator by its port."""

    @property
    def digest(self) -> str:
        return _digest((self.host, self.port, sorted(self.settings.items())))


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The store that several orchestrators share."""

    program: str
    folder: Path
    name: str = "store"
    digest: str = ""
    has_own_ports: bool = False


def _digest(told: object) -> str:
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]


AnySpec = InstanceSpec | OrchestratorSpec | StoreSpec


def specs_of(file: PoolFile) -> dict[str, InstanceSpec | OrchestratorSpec]:
    """All specs in ``file``, by name."""
    specs: dict[str, InstanceSpec | OrchestratorSpec] = {
        name: _spec_of(file, entry, name, at)
        for entry in file.instances
        for at, name in enumerate(entry.instance_names)
    }
    if file.orchestrator is not None:
        told = file.orchestrator
        settings = {variable_of("TIDEGATE_", n): _spelled(v) for n, v in told.settings.items()}
        if file.lanes.tls is not None:
            settings[SETTING] = spell_tls(file.lanes.tls)
        beside = OrchestratorSpec(told.host, told.port, settings, file.pool.drain_s)
        specs[beside.name] = beside
    return specs


def _spec_of(file: PoolFile, entry: InstanceSettings, name: str, at: int) -> InstanceSpec:
    groups = entry.groups
    turn = at % len(groups)
    return InstanceSpec(
        name=name,
        model=entry.model,
        groups=(*groups[turn:], *groups[:turn]),
        settings=_settings(entry),
        ports=numbered_ports((port for _, port in entry.ports), at),
        host=file.pool.host,
        vram_gib=entry.vram_gib,
        load_timeout_s=file.pool.load_timeout_s,
        tls=file.lanes.tls,
    )


def _settings(entry: InstanceSettings) -> dict[str, str]:
    settings = {name: _spelled(value) for name, value in entry.settings.items()}
    settings["engine"] = entry.engine
    settings["device"] = "cuda" if entry.groups[0] else "cpu"
    if entry.model_name:
        settings["model_name"] = entry.model_name
    if entry.memory_gib is not None:
        settings["memory.hard_gib"] = str(entry.memory_gib)
    return {variable(name): value for name, value in settings.items()}


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def numbered_ports(first: Iterable[int], at: int) -> TritonPorts:
    """The ports of the Triton ``at`` (from 0), given those of the first; 0 asks for a free one."""
    return TritonPorts(*(port and port + PORT_STRIDE * at for port in first))
