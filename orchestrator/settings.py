"""Settings of the orchestrator: environment (``TIDEGATE_…``), then ``tidegate.toml``, then these.

Read once at start. A value that does not fit stops the start with the setting's name.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from catalog.hosts import is_loopback
from catalog.paths import JOURNAL_BY_DEFAULT
from orchestrator.instances.discovery.addresses import check_entry, is_source
from orchestrator.lanes import name_of
from orchestrator.lanes.tls import Tls, stated_tls
from orchestrator.placement.policy import Policy
from orchestrator.prediction.feasibility import AdmissionMode
from orchestrator.queue.order import QueueOrder, QueuePolicy, RowPolicy
from orchestrator.tasks.journal.sealing import read_keys
from orchestrator.telemetry.log import LogFormat
from worker.environment import unknown_variables

ENV_PREFIX = "TIDEGATE_"
CONFIG_VARIABLE = "TIDEGATE_CONFIG"
CONFIG_FILE = "tidegate.toml"
ANY_ORIGIN = "*"
_OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    "TIDEGATE_HOME",
    JOURNAL_BY_DEFAULT,
    "TIDEGATE_POOL_MARK",
    "TIDEGATE_TRITON",
    "TIDEGATE_URL",
    "TIDEGATE_WORKER_",
    "TIDEGATE_SLOT_",
)
"""Variables that are read by the launcher and by workers, and are no settings of this process."""
_EMPTY_TOKEN_DIGEST = hashlib.sha256(b"").hexdigest()
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", re.ASCII | re.IGNORECASE)
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _journal_by_default() -> Path | None:
    path = os.environ.get(JOURNAL_BY_DEFAULT)
    return Path(path) if path else None


class InvalidSettings(ValueError):
    """Invalid settings; the message has one line per setting, each with its name."""


class KeySettings(BaseModel):
    """One named key, with exactly one of ``token`` and ``token_sha256`` (hex).

    A limit that the key does not state is the one for every key; 0 means none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: SecretStr | None = None
    token_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    requests_per_min: int | None = Field(default=None, ge=0)
    tokens_per_min: int | None = Field(default=None, ge=0)
    concurrent: int | None = Field(default=None, ge=0)
    names_tenants: bool = False
    """Whether requests may name a tenant; otherwise they all belong to the key's own tenant."""
    is_admin: bool = False

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        return _sendable(value)

    @field_validator("token_sha256")
    @classmethod
    def _check_digest(cls, value: str | None) -> str | None:
        if value is not None and value.lower() == _EMPTY_TOKEN_DIGEST:
            raise ValueError("the digest of an empty token, which everybody has")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> "KeySettings":
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("exactly one of token and token_sha256 is needed")
        return self

    @property
    def digest_hex(self) -> str:
        """SHA-256 of the token, in lower-case hex."""
        if self.token is not None:
            return hashlib.sha256(self.token.get_secret_value().encode()).hexdigest()
        assert self.token_sha256 is not None
        return self.token_sha256.lower()


class Settings(BaseSettings):
    """Settings of one orchestrator."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    # where the service listens, and for whom
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose. The first log line has the port."""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Separate port for health checks, where no load delays them: for kubelets and load balancers
    (LB-4). Needs no token and serves nothing else. None: there is no such port."""
    health_stalled_after_s: float = Field(default=5.0, ge=0.1)
    """How long the event loop may hang before the health port answers 503 ``stalled``."""
    token: SecretStr | None = None
    """Token that every request must show, if set; required to listen off loopback (OR-12)."""
    admin_token: SecretStr | None = None
    """Token for calls that change how the service runs. If no key is an admin's, a random one is
    made and kept in ``TIDEGATE_HOME/operator``, readable by this user alone."""
    keys: dict[str, KeySettings] = {}
    """More tokens, by name: ``[keys.NAME]`` in tidegate.toml, or JSON in the environment."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    all_bodies_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Bound on request bodies that are still arriving, all together; beyond it 503 is answered."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client may take to send its body."""
    strict_fields: bool = False
    """Whether unknown fields are refused on every route. Otherwise OpenAI, Anthropic and KServe
    routes ignore them and name them in ``x-tidegate-ignored``; ``/v2/tasks``, ``/v2/slots``,
    ``/v2/sessions`` and operators' routes always refuse them."""
    model_aliases: Annotated[dict[str, str], NoDecode] = {}
    """Other names for models that clients have built in: ``gpt-4o=demo,claude-*=demo``, or
    ``[model_aliases]`` in tidegate.toml. A ``*`` at the end stands for every name that begins like
    that and that no model has."""
    max_encoding_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Bound on prompts that wait to become tokens, all together."""
    special_tokens_in_prompts: bool = False
    """Whether text that looks like a special token in a plain prompt (``/v1/completions``,
    ``prompt``) is one, for clients that render chat templates themselves. In chats it never is."""
    tool_format: Literal[
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        "qwen3_coder",
        "glm45",
        "deepseek",
        "harmony",
    ] = "auto"
    """How the models write tool calls; ``auto`` derives it from each model's chat template."""
    reasoning_format: Literal["auto", "none", "think", "think_brackets"] = "auto"
    """The tags that the models think in, ``<think>`` or ``[THINK]``; ``none``: all is content."""
    open_objects: bool = False
    """Whether objects in structured output or a forced tool call may have properties that the
    schema does not name, as JSON Schema allows. Otherwise only where the schema says so
    (``additionalProperties``), because models make properties up."""
    spaced_json: bool = False
    """Whether structured output may have white space between JSON tokens, up to 16 characters at a
    time. Otherwise it has none, which spares those tokens."""
    max_connections: int = Field(default=4096, ge=32)
    """Most connections open at a time; fewer where the process may not open so many files. Three
    quarters of them may come from one address; the last 16 are for health checks and operators."""
    header_timeout_s: float = Field(default=20.0, gt=0)
    """How long a client may take to send a request's head, from its first byte on."""
    idle_timeout_s: float = Field(default=90.0, gt=0)
    """A connection is closed after this long without a request, or without reading anything."""

    # web pages
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names other than loopback's that requests without a key may use in ``Host``,
    comma-separated; ``*``: any. Checked only while there is no key at all."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Web pages that may use the service: ``https://ui.example``, comma-separated; ``*``: all."""
    cors_credentials: bool = False
    """Whether those pages' browsers may send cookies, for a proxy in front that checks them."""

    # Triton instances and their lanes
    instances: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1:8001",)
    """``host:port`` of each instance's gRPC endpoint, comma-separated. ``dns:host:port`` stands for
    every address of a name, ``file:path`` for a file with one address per line; both are followed.
    Servers of other kinds are URLs such as ``vllm+http://host:port?tokenizer=DIR``
    (docs/engines.md)."""
    read_instances_every_s: float = Field(default=2.0, gt=0)
    """How often names are resolved and instance files read."""
    leave_grace_s: float = Field(default=30.0, ge=0)
    """How long jobs may go on running on an instance that is no longer listed."""
    load_on_demand: bool = True
    """Whether a requested model that no instance serves is loaded, by an instance whose worker is
    allowed to load it (``TIDEGATE_WORKER_MODELS``)."""
    model_min_residency_s: float = Field(default=10.0, ge=0)
    """Shortest time after its load for which a model that has work is not given up for another."""
    model_load_waiting: int = Field(default=256, ge=0)
    """Most requests that may wait for models to be loaded; one tenant may hold three times what is
    left."""
    lane_token: SecretStr | None = None
    """Token shown to workers that ask for one (``TIDEGATE_WORKER_LANE_TOKEN``). ``tidegate up``
    generates one for both sides."""
    triton_tls: Annotated[Tls | None, NoDecode] = None
    """TLS for every connection to Triton: ``[triton_tls]`` in tidegate.toml, or JSON in the
    environment, with ``ca``, ``certificate`` and ``key`` (mutual TLS), ``server_name``; ``{}`` for
    the system's own TLS settings."""
    lanes_per_instance: int = Field(default=1, ge=1, le=10)
    lane_keepalive_s: float = Field(default=60.0, gt=0)
    lane_open_timeout_s: float = Field(default=5.0, gt=0)
    lane_renew_after_mib: int = Field(default=64, ge=1)
    """Traffic after which a lane is replaced: until a stream ends, Triton (24.10) keeps everything
    that was answered on it."""
    reconnect_min_s: float = Field(default=0.1, gt=0)
    reconnect_max_s: float = Field(default=2.0, gt=0)
    suspect_after_s: float = Field(default=1.0, gt=0)
    """How long an instance may send no frame before it gets no new work (OR-6)."""
    down_after_s: float = Field(default=3.0, gt=0)
    """How long an instance may send no frame before the work on it is given up."""
    backlog_per_instance: int = Field(default=8, ge=0)
    """Most jobs sent to an instance beyond those that it can run; how many are needed to keep its
    slots from idling is learned."""
    placement_policy: str = ""
    """A CEL expression over ``task`` and ``instance``: a condition that instances must meet, or a
    number of which the smallest wins (OR-8). Empty: the built-in policy alone."""

    # retries and hedges (OR-10)
    retry_share: float = Field(default=0.1, ge=0, le=1)
    """Retries of jobs that had not begun, as a share of requests offered; 0: no retries at all,
    begun or not."""
    hedge_share: float = Field(default=0.02, ge=0, le=0.02)
    """Jobs hedged because their first token is late, as a share of requests offered; 0: none."""
    attempts: int = Field(default=3, ge=1, le=10)
    """Most times that a job is sent, the first one included."""

    # deadlines (DL-1, DL-3)
    default_deadline_s: float = Field(default=300.0, gt=0)
    max_deadline_s: float = Field(default=1800.0, gt=0)
    sdk_timeouts: bool = True
    """Whether the timeout that OpenAI's and Anthropic's SDKs send (``x-stainless-…``) ends requests
    that are not streamed, because nobody waits for them any more. It never extends a deadline."""
    admission_floor_ms: float = Field(default=10.0, ge=0)
    deadline_grace_ms: float = Field(default=20.0, ge=0)
    """How long past a deadline a worker may take to report it; then the orchestrator ends the
    task."""

    return_margin_ms: float = Field(default=5.0, ge=0)
    """How long before their deadline answers that end cleanly at it (``partial``, ``fit``) are
    sent, to leave time for the client. Where this process has to wait for a processor, that wait is
    added, up to 6 % of the deadline."""

    # work
    default_max_tokens: int = Field(default=256, ge=1)
    """``max_tokens`` of requests that state none; clipped to what is left of the context."""
    isolate_tenants: bool | None = None
    """Whether tenants share no cached prefixes, so that nobody learns what others have sent from
    ``cached_tokens`` or a quick answer. Unset: isolated once there is more than one key; set it to
    false where all keys may know what the others' prompts begin with."""
    queue_size: int = Field(default=100, ge=-1)
    """Most tasks that may wait for an instance; -1 is unbounded (OR-4). In a full queue,
    interactive work takes the places of batch work, and a tenant with few places those of one with
    more."""

    queue_policy: QueuePolicy = QueuePolicy.REJECT
    """Treatment of tasks that get no place in a full queue: ``reject`` refuses them; with
    ``drop-lru`` the oldest batch task makes room for any newer one."""
    queue_order: QueueOrder = QueueOrder.SLACK
    """Order of the queue; ``deadline`` and ``fifo`` exist to compare with (DL-8)."""
    row_policy: RowPolicy = RowPolicy.ADAPTIVE
    """How many rows an instance runs at once: as many as meet the most deadlines by the latest
    requests (``adaptive``), or as many as its worker has slots for (``fixed``)."""
    admission: AdmissionMode = AdmissionMode.ENFORCE
    """Whether work that is certain to miss its deadline is refused (``enforce``), only counted
    (``observe``), or neither (``off``) (DL-7)."""
    refusal_cap: float = Field(default=0.95, ge=0, le=1)
    """Largest share of recent work that is refused as infeasible; beyond it everything is let
    in."""
    refusal_sample: float = Field(default=0.01, ge=0, le=1)
    """Share of infeasibility refusals, and of all other decisions that end a request unserved, that
    are not carried out, to measure how many are wrong (DL-17)."""
    batch_objectives: Annotated[tuple[str, ...], NoDecode] = ("batch",)
    """Gateway objectives (``x-llm-d-inference-objective``) that make a request batch work,
    comma-separated. What the request itself states (``priority``, ``service_tier``) takes
    precedence."""
    drop_infeasible: bool = True
    """Whether waiting work is dropped once it is certain to miss its deadline, rather than only at
    the deadline; with ``admission = enforce``."""
    pause: bool = True
    """Whether a running job may be paused, its KV kept, so that a more urgent one gets its slot."""
    deadline_scope: Literal["request", "queue"] = "request"
    """Scope of a deadline. ``queue`` leaves work alone once it has started, like a queue timeout;
    it exists to compare with."""

    # sessions (WK-9)
    session_keep_s: float = Field(default=30.0, ge=0)
    """How long a conversation's KV is kept for its next turn, for requests with a ``session_id``
    that do not say (``idle_keep_s``). ``TIDEGATE_WORKER_SESSION_KV_SHARE`` bounds how much is kept;
    running jobs get the blocks when no others are left."""
    max_session_keep_s: float = Field(default=600.0, ge=0)
    """Longest ``idle_keep_s`` that a client may ask for."""
    session_ttl_s: float = Field(default=3600.0, gt=0)
    """How long a session (``/v2/sessions``) is kept without a turn."""
    sessions_per_key: int = Field(default=1000, ge=0)
    session_bytes: int = Field(default=2**20, ge=1024)
    """Bound on the text of one session."""
    all_sessions_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Bound on the text of all sessions together."""

    # limits (OR-12); 0 is none, per-minute rates allow one minute's worth at once
    key_requests_per_min: int = Field(default=0, ge=0)
    key_tokens_per_min: int = Field(default=0, ge=0)
    key_concurrent: int = Field(default=0, ge=0)
    """Limits of each key that states none of its own: requests per minute, tokens per minute, and
    requests in progress."""
    all_requests_per_min: int = Field(default=0, ge=0)
    all_tokens_per_min: int = Field(default=0, ge=0)
    all_concurrent: int = Field(default=0, ge=0)
    """Limits of all keys together."""

    # clients that read answers
    slow_client_buffer_bytes: int = Field(default=2**20, ge=4096)
    """How far a client may fall behind before it is disconnected (OR-11)."""
    slow_client_kernel_bytes: int = Field(default=2**15, ge=4096)
    """Approximate bound on what the kernel may hold for a client, beyond
    ``slow_client_buffer_bytes``."""
    slow_client_timeout_s: float = Field(default=10.0, gt=0)
    """How long a client may take nothing while something waits for it before it is disconnected."""
    slow_client_pause_s: float = Field(default=0.5, gt=0)
    """How long a client may be behind before its job may be paused for others that wait
    (``pause``); the job goes on once the client has read what there is."""
    sse_keepalive_s: float = Field(default=15.0, ge=0)
    """Longest silence of an event stream before it carries a comment; 0: no limit, except that a
    comment is sent with the headers if there was no event within a second."""
    metrics_event_ms: float = Field(default=1000.0, ge=0)
    """Shortest time between two ``metrics`` events among a task's tokens; 0: none are sent."""
    keep_tasks: int = Field(default=1000, ge=0)
    keep_tasks_s: float = Field(default=600.0, ge=0)
    keep_tokens: int = Field(default=1_000_000, ge=0)
    keep_bytes: int = Field(default=128 * 2**20, ge=0)
    """Bounds within which ended tasks are kept for replay; all four must hold. A token weighs 104
    bytes; with the 20 most likely ones beside it, 2.6 KB."""

    keep_responses: int = Field(default=1000, ge=0)
    keep_responses_s: float = Field(default=3600.0, ge=0)
    keep_responses_bytes: int = Field(default=64 * 2**20, ge=0)
    """Bounds within which answers of ``/v1/responses`` are kept, whose clients go on from an
    earlier answer by its id; 0 keeps none. A conversation weighs what its text does, with each of
    its answers."""

    # durable tasks (OR-5)
    journal_path: Path | None = Field(default_factory=_journal_by_default)
    """File in which tasks with ``durable: true`` are recorded, to outlive this process; on a local
    disk, for this orchestrator alone. Not stated: ``TIDEGATE_HOME/journal/HOST-PORT.db`` if started
    by ``tidegate up``, else none. Empty: none, and no durable tasks."""
    durable_default: bool = False
    """Whether tasks (``/v2/tasks``) that do not say are durable."""
    journal_async: bool = False
    """Whether tasks are promised before they are on the disk; the answer says how much may be
    lost."""
    journal_window_ms: float = Field(default=100.0, gt=0, le=10_000)
    """Window of recent work that may be lost with the process, with ``journal_async``."""
    journal_keep_results_s: float = Field(default=86_400.0, ge=0)
    """How long a durable task's text is kept after its end, for whoever asks for it then."""
    journal_keep_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long a durable task's outcome and ``Idempotency-Key`` are kept after its end."""
    journal_key: SecretStr | None = None
    """Key that encrypts prompts and texts in the journal: 32 bytes in base64; needs the extra
    ``journal``. Of several, comma-separated, the first encrypts and all of them decrypt, so that a
    key can be replaced."""

    # files and batches (docs/batches.md), in the folder JOURNAL.batches beside the journal
    batch_window: int = Field(default=32, ge=1, le=10_000)
    """Most lines of all batches in progress at once. As many as the instances can run keep them
    busy; more wait in the queue, where interactive work goes first."""
    batch_max_lines: int = Field(default=100_000, ge=1, le=10_000_000)
    """Most requests in one batch."""
    batch_file_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Most bytes in one file."""
    batch_folder_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Most bytes that all files may take on the disk. Uploads leave a tenth of it to the outcomes
    of batches, which wait when that is full too."""
    batch_keep_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long a file is kept after its upload, and a batch with its results after its end."""

    # slots (docs/slot.md)
    slots_queue_size: int = Field(default=100, ge=0)
    """Most slots that may wait for an instance."""
    keep_slots: int = Field(default=200, ge=0)
    keep_slots_s: float = Field(default=600.0, ge=0)
    keep_slot_bytes: int = Field(default=256 * 2**20, ge=0)
    """Bounds within which ended slots are kept with their files; all three must hold."""

    # end of the process (OR-14)
    shutdown_grace_s: float = Field(default=30.0, ge=0)
    """How long running tasks may take to finish after SIGTERM."""
    interrupt_grace_s: float = Field(default=2.0, ge=0)
    """How long running tasks may take to finish after Ctrl-C."""

    vllm_metrics: bool = False
    """Whether ``/metrics`` also has the metrics that endpoint pickers and autoscalers read of vLLM,
    under vLLM's names (``vllm:num_requests_waiting`` …); ``/metrics/vllm`` has these alone."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/?#\s]+[^?#\s]*$")
    """OTLP receiver that traces are sent to over HTTP, such as http://localhost:4318; unset: no
    traces. Needs the extra ``otel``."""
    log_format: LogFormat = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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

    @field_validator(
        "instances", "allowed_hosts", "cors_origins", "batch_objectives", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("model_aliases", mode="before")
    @classmethod
    def _split_aliases(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        return {alias.strip(): model.strip() for alias, _, model in pairs}

    @field_validator("model_aliases")
    @classmethod
    def _check_aliases(cls, value: dict[str, str]) -> dict[str, str]:
        for alias, model in value.items():
            if not (alias and model) or "*" in alias[:-1]:
                raise ValueError(
                    f"expected ALIAS=MODEL, with * at the end of ALIAS only, got {alias}={model}"
                )
        return value

    @field_validator("triton_tls", mode="before")
    @classmethod
    def _stated_tls(cls, value: object) -> object:
        return stated_tls(value) if isinstance(value, str) else value

    @field_validator("instances")
    @classmethod
    def _check_instances(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one host:port, dns:host:port, file:path or URL is needed")
        if len(set(value)) != len(value):
            raise ValueError("an instance is named twice")
        for entry in value:
            check_entry(entry)
        names = [name_of(entry) for entry in value if not is_source(entry)]
        if len(set(names)) < len(names):
            raise ValueError("two instances have the same name; give one another (name=…)")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if "/" in host or (host != "*" and "*" in host):
                raise ValueError(f"expected a host such as llm.example, or *, got {host}")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"expected scheme://host[:port] without a path, or *, got {origin}"
                )
        return value

    @field_validator("placement_policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value:
            Policy.compile(value)
        return value

    @field_validator("token", "admin_token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        return _sendable(value)

    @field_validator("lane_token")
    @classmethod
    def _check_lane_token(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value is not None and value.get_secret_value() else None

    @field_validator("journal_path", mode="before")
    @classmethod
    def _check_journal_path(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("journal_key")
    @classmethod
    def _check_journal_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        read_keys(value.get_secret_value())
        return value

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, value: dict[str, KeySettings]) -> dict[str, KeySettings]:
        for name in value:
            if not _KEY_NAME.fullmatch(name):
                raise ValueError(f"a key's name must be 1 to 64 letters, digits or . _ -: {name!r}")
        return value

    @model_validator(mode="after")
    def _check_listening(self) -> "Settings":
        tokens = [t.get_secret_value() for t in (self.token, self.admin_token) if t is not None]
        digests = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
        digests += [key.digest_hex for key in self.keys.values()]
        if len(set(digests)) < len(digests):
            raise ValueError("keys: two keys have the same token")
        if self.token is None and not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"token: must be set to listen on {self.host}, which is not loopback "
                f"(set {ENV_PREFIX}TOKEN, or listen on 127.0.0.1)"
            )
        if self.journal_path is None:
            for name in ("durable_default", "journal_async", "journal_key"):
                if getattr(self, name):
                    raise ValueError(f"{name}: needs {ENV_PREFIX}JOURNAL_PATH")
        if self.journal_keep_s < self.journal_keep_results_s:
            raise ValueError("journal_keep_s: must not be below journal_keep_results_s")
        if self.health_port and self.health_port == self.port:
            raise ValueError("health_port: must not be port, which serves health checks anyway")
        if self.cors_credentials and ANY_ORIGIN in self.cors_origins:
            raise ValueError(
                "cors_credentials: not together with cors_origins = *; name the origins"
            )
        if self.all_bodies_bytes < self.max_body_bytes:
            raise ValueError("all_bodies_bytes: must not be below max_body_bytes")
        if self.suspect_after_s > self.down_after_s:
            raise ValueError("suspect_after_s: must not be above down_after_s")
        return self


def _sendable(token: SecretStr | None) -> SecretStr | None:
    """The token, None for an empty one. Raises ``ValueError`` if it cannot travel in a header."""
    if token is None or not token.get_secret_value():
        return None
    if not token.get_secret_value().isascii() or " " in token.get_secret_value():
        raise ValueError("only printable ASCII without spaces can travel in a header")
    return token


def load_settings(**overrides: object) -> Settings:
    """Settings from all sources; ``overrides`` win. Raises ``InvalidSettings``."""
    lines = unknown_variables(Settings, renamed={}, others=_OTHER_VARIABLES)
    file = os.environ.get(CONFIG_VARIABLE)
    if file is not None and not Path(file).is_file():
        lines.append(f"{CONFIG_VARIABLE}: there is no file {file}")
    try:
        settings = Settings(**overrides)  # type: ignore[arg-type]  # checked by pydantic
        if not lines:
            return settings
    except ValidationError as error:
        lines += [_explain(detail["loc"], detail["msg"]) for detail in error.errors()]
    except (ValueError, OSError) as error:  # tidegate.toml is not TOML, or cannot be read
        raise InvalidSettings(f"{os.environ.get(CONFIG_VARIABLE, CONFIG_FILE)}: {error}") from None
    raise InvalidSettings("\n".join(lines))


def _explain(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        name, _, message = message.partition(": ")
        return f"{ENV_PREFIX}{name.upper()}: {message}"
    name = str(location[0])
    if len(location) > 1:  # inside a table
        message = f"{'.'.join(map(str, location[1:]))}: {message}"
    if message == "Extra inputs are not permitted":
        return f"{name}: not a setting; see {__file__} for those there are"
    return f"{ENV_PREFIX}{name.upper()}: {message}"
