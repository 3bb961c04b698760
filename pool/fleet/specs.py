"""The wanted configuration of a pool, from its file or from the request of ``tidegate up``:
instances, orchestrators, a store."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from catalog.paths import JOURNAL_BY_DEFAULT, MODEL_REPOSITORY, journal_file, state_dir
from orchestrator.tls import SETTING, Tls, spell_tls
from pool.engines.triton import TritonPorts
from pool.pool_file import InstanceSettings, PoolFile
from pool.process.ports import PORT_STRIDE
from pool.supervise import RestartPolicy
from worker.environment import variable_of
from worker.settings import variable

MODELS = ("llm",)
"""The models in the model repository that a pool's Triton loads."""
SLOT_MODEL = "slot"
ORCHESTRATOR = "orchestrator"
_ADVERTISE = "TIDEGATE_STATE__ADVERTISE"
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
    ready_within_s: float | None = None

    @property
    def digest(self) -> str:
        return _digest((self.host, self.port, sorted(self.settings.items())))


def _digest(told: object) -> str:
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]


AnySpec = InstanceSpec | OrchestratorSpec


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


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """The request of ``tidegate up``: one run of the launcher."""

    worker_env: Mapping[str, str] = field(default_factory=dict)
    """Variables ``TIDEGATE_WORKER__…`` and ``TIDEGATE_SLOT__…`` for every instance."""
    host: str = "127.0.0.1"
    port: int = 8080
    """The orchestrator's port; 0 asks for a free port."""
    serve: bool = True
    """Whether to start an orchestrator; otherwise Triton only."""
    instances: int = 1
    gpus: tuple[str, ...] = ()
    """CUDA devices, divided among the instances; empty leaves the choice to the worker."""
    gpus_each: int = 1
    """Number of ``gpus`` per instance; a divisor of their number."""
    triton: Path | None = None
    """A server to use instead of the first one found."""
    triton_host: str = "127.0.0.1"
    triton_open: bool = False
    """Whether clients off loopback may also generate without a token."""
    lane_token: str = field(default="", repr=False)
    """Token that orchestrator and workers share. If empty and both are started, it is random."""
    tls: Tls | None = None
    """TLS between orchestrator and Tritons; both present the certificate."""
    triton_ports: TritonPorts = CHOSEN
    """Ports of the first Triton; each next one adds ``PORT_STRIDE``; 0 asks for free ports.
    Tritons for clips come after those for text."""
    model_repository: Path = MODEL_REPOSITORY
    models: tuple[str, ...] = ("llm",)
    load_timeout_s: float = 300.0
    drain_s: float = 1.0
    """Seconds for running work at shutdown. The shutdown takes 3.5 s more."""
    home: Path = field(default_factory=state_dir)
    log_to_stderr: bool = False
    """Whether to log to stderr instead of files in ``home``/logs/<host>-<port>."""
    state_file: Path | None = None
    """File with address, ports and process ids as JSON while the service is up; None for none."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def runs_gguf(self) -> bool:
        """Whether llama.cpp's server runs the text model, instead of a Triton."""
        return self.worker_env.get("TIDEGATE_WORKER__ENGINE") == "llamacpp"

    @property
    def instance_specs(self) -> list[InstanceSpec]:
        """The instances, with their requested ports. With an orchestrator, each Triton has one
        model: if two models share a Triton, a crash of either one's process ends both."""
        kinds = [("triton", self.models)]
        if self.serve and SLOT_MODEL in self.models and len(self.models) > 1:
            text = tuple(model for model in self.models if model != SLOT_MODEL)
            kinds = [("triton", text), ("slots", (SLOT_MODEL,))]
        made: list[InstanceSpec] = []
        tritons = 0
        for kind, models in kinds:
            is_gguf = self.runs_gguf and models != (SLOT_MODEL,)
            name = "llamacpp" if is_gguf else kind
            for index in range(self.instances):
                ports = CHOSEN if is_gguf else numbered_ports(self.triton_ports, tritons)
                tritons += not is_gguf
                made.append(
                    InstanceSpec(
                        name if self.instances == 1 else f"{name}-{index}",
                        model="",
                        groups=(self._gpus_of(index),),
                        settings=self.worker_env,
                        ports=ports,
                        host=self.triton_host,
                        load_timeout_s=self.load_timeout_s,
                        models=models,
                        tls=self.tls,
                    )
                )
        return made

    def orchestrator_spec(
        self, port: int, lane_token: str, env: Mapping[str, str]
    ) -> OrchestratorSpec:
        """The orchestrator at ``port``; ``env`` names the instances."""
        settings = {
            "TIDEGATE_SHUTDOWN__GRACE_S": str(self.drain_s),
            "TIDEGATE_HOME": str(self.home),
            **env,
            "TIDEGATE_LANES__TOKEN": lane_token,
            SETTING: spell_tls(self.tls),
            JOURNAL_BY_DEFAULT: str(journal_file(self.home, self.host, port)),
            **({"TIDEGATE_SLOTS__SERVE": "true"} if SLOT_MODEL in self.models else {}),
        }
        return OrchestratorSpec(self.host, port, settings, ready_within_s=self.load_timeout_s)

    def _gpus_of(self, index: int) -> tuple[str, ...]:
        """The GPUs of the instance ``index``."""
        first = index * self.gpus_each % len(self.gpus) if self.gpus else 0
        return self.gpus[first : first + self.gpus_each]
