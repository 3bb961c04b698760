"""Settings of the orchestrator: the environment (``TIDEGATE_…``) overrides ``tidegate.toml``, which
overrides the defaults in this module.

Settings are read once at startup. An invalid value stops the startup; the error names the setting.
Each table of ``tidegate.toml`` is a section here. An environment variable has two underscores for
each dot: ``[queue] max_waiting`` is ``TIDEGATE_QUEUE__MAX_WAITING``."""

import hashlib
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import (
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from catalog.hosts import is_loopback
from catalog.paths import JOURNAL_BY_DEFAULT
from orchestrator.instances.addresses import check_entry, is_source
from orchestrator.lanes import LaneConfig, name_of
from orchestrator.settings.rooms import RoomSection, defined_in, modules_of_rooms
from orchestrator.settings.sections import (
    AdmissionSettings,
    DispatchSettings,
    HealthSettings,
    HttpSettings,
    JournalSettings,
    KeySettings,
    LimitSettings,
    LoadingSettings,
    ModelSettings,
    PlacementSettings,
    QueueSettings,
    ShutdownSettings,
    StreamSettings,
    TelemetrySettings,
    Token,
)
from orchestrator.tasks.deadline import DeadlineConfig
from worker.environment import DELIMITER, Names, explained, nested, unknown_variables, unreadable

R = TypeVar("R", bound=RoomSection)

ENV_PREFIX: Final = "TIDEGATE_"
CONFIG_VARIABLE: Final = "TIDEGATE_CONFIG"
CONFIG_FILE: Final = "tidegate.toml"
OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    "TIDEGATE_HOME",
    JOURNAL_BY_DEFAULT,
    "TIDEGATE_POOL_MARK",
    "TIDEGATE_TRITON",
    "TIDEGATE_URL",
    "TIDEGATE_LEGACY_STUB",
    "TIDEGATE_SHARED_BY",
    "TIDEGATE_WORKER_",
    "TIDEGATE_SLOT_",
)
"""Variables that the launcher and workers read. They are not settings of this process."""
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class InvalidSettings(ValueError):
    """Invalid settings; the message has one line per setting, each with its name."""


class Settings(BaseSettings):
    """Settings of one orchestrator."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter=DELIMITER, frozen=True, extra="forbid"
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose. The first log line has the port."""
    token: Token = None
    """Token that every request must send, if set. Required to listen off loopback (OR-12)."""
    admin_token: Token = None
    """Token for calls that change how the service runs. If there is no admin key, the service
    generates a random token in ``TIDEGATE_HOME/operator``, which only this user can read."""
    keys: dict[str, KeySettings] = {}
    """More tokens, by name: ``[keys.NAME]`` in tidegate.toml, or JSON in the environment."""
    isolate_tenants: bool | None = None
    """Whether each tenant has its own cached prefixes. A shared prefix reveals another tenant's
    prompt through ``cached_tokens`` or a fast answer. Unset: true if there is more than one key."""
    instances: Names = ("127.0.0.1:8001",)
    """Instances, comma-separated: ``host:port`` of a gRPC endpoint; ``dns:host:port`` for every
    address of a name, which is followed; URLs of other servers (docs/engines.md). Empty: only those
    registered with ``POST /v2/instances``."""

    http: HttpSettings = HttpSettings()
    health: HealthSettings = HealthSettings()
    streams: StreamSettings = StreamSettings()
    limits: LimitSettings = LimitSettings()
    deadlines: DeadlineConfig = DeadlineConfig()
    admission: AdmissionSettings = AdmissionSettings()
    queue: QueueSettings = QueueSettings()
    placement: PlacementSettings = PlacementSettings()
    dispatch: DispatchSettings = DispatchSettings()
    lanes: LaneConfig = LaneConfig()
    models: ModelSettings = ModelSettings()
    loading: LoadingSettings = LoadingSettings()
    journal: JournalSettings = Field(default_factory=JournalSettings)
    shutdown: ShutdownSettings = ShutdownSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = Path(os.environ.get(CONFIG_VARIABLE, CONFIG_FILE))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, file)

    @field_validator("instances")
    @classmethod
    def _check_instances(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("the list has an instance twice; remove one of them")
        for entry in value:
            check_entry(entry)
        names = [name_of(entry) for entry in value if not is_source(entry)]
        if len(set(names)) < len(names):
            raise ValueError("two instances have the same name; rename one of them (name=…)")
        return value

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, value: dict[str, KeySettings]) -> dict[str, KeySettings]:
        for name in value:
            if not _KEY_NAME.fullmatch(name):
                raise ValueError(f"a key's name must be 1 to 64 letters, digits or . _ -: {name!r}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        tokens = [t.get_secret_value() for t in (self.token, self.admin_token) if t is not None]
        digests = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
        digests += [key.digest_hex for key in self.keys.values()]
        if len(set(digests)) < len(digests):
            raise ValueError("keys: two keys have the same token; give each its own")
        if self.token is None and not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"token: must be set to listen on {self.host}, which is not loopback "
                f"(set {ENV_PREFIX}TOKEN, or listen on 127.0.0.1)"
            )
        sections = [each for _, each in self if isinstance(each, RoomSection)]
        has_journal = self.journal.path is not None or any(
            each.keeps_durable_tasks for each in sections
        )
        if self.journal.loss_window_ms and not has_journal:
            raise ValueError(f"journal.loss_window_ms: needs {ENV_PREFIX}JOURNAL__PATH")
        is_asked_for = "port" in self.health.model_fields_set
        if is_asked_for and self.health.port and self.health.port == self.port:
            raise ValueError("health.port: must not be port, which serves health checks anyway")
        for section in sections:
            section.check(self)
        return self

    def section(self, kind: type[R]) -> R:
        """A room's section, or its defaults if these settings do not have the section."""
        value = getattr(self, kind.table, None)
        return value if isinstance(value, kind) else kind()


@cache
def whole_settings() -> type[Settings]:
    """``Settings`` with the sections of all installed rooms."""
    modules = modules_of_rooms("section")
    sections = [kind for module in modules for kind in defined_in(module, RoomSection)]
    fields: dict[str, Any] = {kind.table: (kind, Field(default_factory=kind)) for kind in sections}
    return create_model("Settings", __base__=Settings, __module__=__name__, **fields)


def load_settings(**overrides: object) -> Settings:
    """Load the settings from all sources. ``overrides`` have names such as ``queue__max_waiting``
    and take precedence. Raises ``InvalidSettings``."""
    kind = whole_settings()
    lines = unknown_variables(kind, OTHER_VARIABLES)
    file = os.environ.get(CONFIG_VARIABLE)
    if file is not None and not Path(file).is_file():
        lines.append(f"{CONFIG_VARIABLE}: the file {file} does not exist")
    try:
        settings = kind(**nested(overrides))
        if not lines:
            return settings
    except SettingsError as error:
        lines = lines or [unreadable(kind, error)]
    except ValidationError as error:
        lines += explained(kind, error)
    except (ValueError, OSError) as error:  # tidegate.toml is unreadable or not valid TOML
        raise InvalidSettings(f"{os.environ.get(CONFIG_VARIABLE, CONFIG_FILE)}: {error}") from None
    raise InvalidSettings("\n".join(lines))
