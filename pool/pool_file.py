"""``pool.toml``: the instances of this machine, and the orchestrators to tell about them (PV-1).

An invalid file is refused as a whole. Each mistake, including an unknown key, is reported with its
key. The file holds no secrets: it names environment variables that hold them.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from catalog.errors import PoolFileInvalid
from orchestrator.tls import Tls
from pool.process.ports import LAST_PORT, PORT_STRIDE
from worker.environment import fields_of, problem_of
from worker.settings import WorkerSettings

Scalar = bool | int | float | str
Devices = Literal["cpu"] | Annotated[tuple[str, ...], Field(min_length=1)]
Port = Annotated[int, Field(ge=0, le=65535)]

_NAME = r"^[a-z0-9][a-z0-9._-]{0,47}$"
_REGISTER = re.compile(r"https?://[^/\s@?#]+/?", re.ASCII)
_HOST = r"^[A-Za-z0-9._:%\[\]-]*$"
_KEY = re.compile(r"[a-z_][\w.-]*")
_GROUP = re.compile(r"[\w./:-]+(,[\w./:-]+)*", re.ASCII)
_GIVEN_ELSEWHERE = {
    "model_path": "model",
    "model_name": "model_name",
    "engine": "engine",
    "device": "devices",
    "memory.hard_gib": "memory_gib",
    "lane_token": "the environment variable TIDEGATE_LANES__TOKEN",
    "plain.token": "the environment variable TIDEGATE_WORKER__PLAIN__TOKEN",
}
"""Worker settings that the pool sets itself, each with the place to set it instead."""
_ON_ONE_GPU = frozenset({"torch"})
"""Engines that use only one GPU."""
MAX_INSTANCES = 256
"""Maximum number of instances of one pool (one machine): as many as an orchestrator registers."""
_MAX_MISTAKES = 20
"""Maximum number of mistakes to report for one file."""
_DAY_S = 86_400.0


def _by_dotted_names(value: object) -> object:
    """A table with its tables flattened: ``{"kv": {"blocks": 4}}`` becomes ``{"kv.blocks": 4}``."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, object] = {}
    for name, each in value.items():
        inner = _by_dotted_names(each)
        if isinstance(inner, dict):
            flat |= {f"{name}.{below}": what for below, what in inner.items()}
        else:
            flat[name] = each
    return flat


SettingsTable = Annotated[dict[str, Scalar], BeforeValidator(_by_dotted_names)]
"""Settings by their dotted names."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PoolSettings(_Strict):
    """``[pool]``. Times are seconds."""

    home: Path | None = None
    """Folder for state, logs and run folders; ``pool`` in TIDEGATE_HOME by default."""
    heartbeat_s: float = Field(default=15.0, gt=0, le=_DAY_S)
    """Seconds between heartbeats; after three without an answer an instance is down."""
    drain_s: float = Field(default=30.0, ge=0, le=_DAY_S)
    """Seconds for running work when an instance is removed, replaced or ended."""
    load_timeout_s: float = Field(default=300.0, gt=0, le=_DAY_S)
    host: str = Field(default="127.0.0.1", pattern=_HOST)
    """Address where the Tritons listen."""
    advertise: str = Field(default="", pattern=_HOST)
    """Address for orchestrators, if they reach this machine under another name."""
    open: bool = False
    """Whether clients off loopback may also generate without a token."""
    triton: Path | None = None
    """A Triton server to use instead of the first one found."""
    metrics_port: Port | None = None
    """Port of the manager's own metrics, on loopback; none by default."""


class LanesTable(_Strict):
    """``[lanes]``: connections between the Tritons and the pool's orchestrator."""

    tls: Tls | None = None
    """``[lanes.tls]``: TLS at the Tritons' gRPC ports (docs/operating.md)."""


class OrchestratorsSettings(_Strict):
    """``[orchestrators]``: the targets to update with the ready instances."""

    register_at: tuple[str, ...] = Field(default=(), alias="register")
    """Their URLs."""
    key_env: str = "TIDEGATE_ADMIN_TOKEN"
    """The environment variable with the admin key for these orchestrators. If empty, it is the key
    that an orchestrator of this user keeps on this machine."""

    @field_validator("register_at")
    @classmethod
    def _check_register(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _REGISTER.fullmatch(entry):
                raise ValueError(
                    "expected http://HOST:PORT without a path or a password, got "
                    f"{entry.rpartition('@')[2]!r}"
                )
        return value


class OrchestratorSettings(_Strict):
    """``[orchestrator]``: an orchestrator on this machine that follows the instances."""

    host: str = "127.0.0.1"
    port: Port = 8080
    settings: SettingsTable = {}
    """The orchestrator's settings (``TIDEGATE_…``) by name, such as ``queue.max_waiting``."""

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, value: dict[str, Scalar]) -> dict[str, Scalar]:
        # Imported here, because it imports a large part of the orchestrator.
        from orchestrator.settings import whole_settings

        return _checked(value, whole_settings(), "a setting of the orchestrator")


class PortsSettings(_Strict):
    """Ports of the first instance; each next one adds 10. For 0, a free port is chosen and kept."""

    http: Port = 0
    grpc: Port = 0
    metrics: Port = 0


class InstanceSettings(_Strict):
    """One ``[[instances]]``: ``count`` Tritons of the same kind."""

    name: str = Field(pattern=_NAME)
    model: str = Field(min_length=1)
    """``demo``, a registered name, a checkpoint folder or a .gguf file."""
    model_name: str = ""
    """The model's name for clients."""
    engine: str = "auto"
    devices: Devices = "cpu"
    """``"cpu"``, or the GPUs of each instance: ``[0, 1]`` gives one each, ``["0,1", "2,3"]`` two
    each. GPUs are numbers, or UUIDs of GPUs and MIG devices."""
    count: int | None = Field(default=None, ge=1, le=64)
    """Number of instances; by default, one for each entry of ``devices``."""
    vram_gib: float | None = Field(default=None, gt=0)
    """GiB that it needs on each of its GPUs; estimated by default."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Maximum GiB that the worker may use (TIDEGATE_WORKER__MEMORY__HARD_GIB)."""
    ports: PortsSettings = PortsSettings()
    settings: SettingsTable = {}
    """The worker's settings (``TIDEGATE_WORKER__…``) by name, such as ``kv.blocks``."""

    @field_validator("devices", mode="before")
    @classmethod
    def _name_devices(cls, value: object) -> object:
        if value == "cpu":
            return value
        if not isinstance(value, list):
            raise ValueError(f'expected "cpu" or a list of GPUs, got {value!r}')
        for each in value:
            if isinstance(each, bool) or not _GROUP.fullmatch(str(each)):
                raise ValueError(f'expected GPUs as 0, "0,1" or "GPU-…", got {each!r}')
            group = str(each).split(",")
            if len(set(group)) < len(group):
                raise ValueError(f"a GPU is twice in the group {each!r}")
        named = tuple(str(each) for each in value)
        if len(set(named)) < len(named):
            raise ValueError("a GPU or group is named twice; say with count how many share it")
        return named

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: str) -> str:
        known = (*get_args(WorkerSettings.model_fields["engine"].annotation), "llamacpp")
        if value not in known:
            raise ValueError(f"expected one of {', '.join(known)}, got {value!r}")
        return value

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, value: dict[str, Scalar]) -> dict[str, Scalar]:
        return _checked(value, WorkerSettings, "a worker setting", _GIVEN_ELSEWHERE)

    @model_validator(mode="after")
    def _check_groups(self) -> "InstanceSettings":
        if self.engine in _ON_ONE_GPU and any(len(group) > 1 for group in self.groups):
            raise ValueError(
                f"the engine {self.engine} uses one GPU: list GPUs one by one, as"
                " devices = [0, 1], or use the engine vllm"
            )
        return self

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs of each instance; one empty group for the CPU."""
        if self.devices == "cpu":
            return ((),)
        return tuple(tuple(group.split(",")) for group in self.devices)

    @property
    def instance_names(self) -> tuple[str, ...]:
        """Names of the instances. The first has no number, so that it stays when others come."""
        count = len(self.groups) if self.count is None else self.count
        return (self.name, *(f"{self.name}-{i}" for i in range(1, count)))


class PoolFile(_Strict):
    """The whole file."""

    pool: PoolSettings = PoolSettings()
    lanes: LanesTable = LanesTable()
    orchestrators: OrchestratorsSettings = OrchestratorsSettings()
    orchestrator: OrchestratorSettings | None = None
    instances: tuple[InstanceSettings, ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> "PoolFile":
        names = [name for entry in self.instances for name in entry.instance_names]
        for name, count in Counter(["orchestrator", *names]).items():
            if count > 1:
                raise ValueError(f"two instances would be called {name}; rename one")
        if len(names) > MAX_INSTANCES:
            raise ValueError(f"a pool can have at most {MAX_INSTANCES} instances, got {len(names)}")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> "PoolFile":
        """Refuse two uses of one port. A free port replaces 0 later."""
        fixed = {"metrics_port": self.pool.metrics_port}
        if self.orchestrator is not None:
            fixed["the orchestrator's port"] = self.orchestrator.port
        for entry in self.instances:
            for at, name in enumerate(entry.instance_names):
                for kind, first in entry.ports:
                    fixed[f"the {kind} port of {name}"] = first and first + PORT_STRIDE * at
        taken: dict[int, str] = {}
        for what, port in fixed.items():
            if port and port > LAST_PORT:
                raise ValueError(f"{what} would be {port}, and the last port is {LAST_PORT}")
            if port and (other := taken.setdefault(port, what)) != what:
                raise ValueError(f"{what} and {other} would both be {port}")
        return self


def _checked(
    table: dict[str, Scalar],
    kind: type[BaseModel],
    what: str,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Scalar]:
    """Return ``table`` if its entries are valid settings of ``kind``, which errors call ``what``.
    ``elsewhere`` has settings with another place. Raises ``ValueError``."""
    for name, value in table.items():
        if place := elsewhere.get(name):
            problem = f"not set here: set it with {place}"
        else:
            problem = problem_of(name, kind, what)
        if not problem and name != "engine_args":  # the worker checks that one
            problem = _misfit(fields_of(kind)[name], value)
        if problem:
            raise ValueError(f"{name}: {problem}")
    return table


def _misfit(field: FieldInfo, value: Scalar) -> str:
    """Why a value is invalid for a setting; empty if it is valid."""
    kind: Any = Annotated[(field.annotation, *field.metadata, None)]  # at least two
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        return f"{error.errors()[0]['msg']}, got {value!r}"
    return ""


def read_pool_file(path: Path) -> PoolFile:
    """Read the file at ``path``. Raises ``PoolFileInvalid`` with a line for each mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PoolFileInvalid(f"cannot read {path}: {reason}; docs/pool.md shows one") from error
    return parse_pool_file(text, str(path))


def parse_pool_file(text: str, where: str = "pool.toml") -> PoolFile:
    """Parse a pool file's text; errors state its source, ``where``. Raises ``PoolFileInvalid``."""
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise PoolFileInvalid(f"{where}: its values are nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits raises no TOMLDecodeError
        raise PoolFileInvalid(f"{where}: {error}") from error
    try:
        return PoolFile.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors()
        lines = [f"{where}: {_described(detail)}" for detail in mistakes[:_MAX_MISTAKES]]
        if len(mistakes) > _MAX_MISTAKES:
            lines.append(f"{where}: and {len(mistakes) - _MAX_MISTAKES} more")
        raise PoolFileInvalid("\n".join(dict.fromkeys(lines))) from None


def _described(detail: ErrorDetails) -> str:
    """A mistake as its key and what is wrong: ``instances[0].model: Field required``."""
    # Pydantic adds the members of a union to the keys.
    keys = [key for key in detail["loc"] if isinstance(key, int) or _KEY.fullmatch(key)][:4]
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    what = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        what = "unknown key; see docs/pool.md"
    return f"{where[1:] or 'the file'}: {what}"
