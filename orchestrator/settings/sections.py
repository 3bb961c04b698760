"""The tables of the orchestrator's settings, most of them named after a package.

Those that a package uses as they are stand in it: ``LaneConfig``, ``DeadlineConfig``,
``Limits``.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from catalog.paths import JOURNAL_BY_DEFAULT
from orchestrator.admission.rate_limits import Limits
from orchestrator.placement.policy import Policy
from orchestrator.prediction.feasibility import AdmissionMode
from orchestrator.queue.order import QueueOrder, QueuePolicy, RowPolicy
from orchestrator.tasks.journal.store import KEEP_OUTCOMES_S
from orchestrator.telemetry.log import LogFormat
from worker.environment import Names, Section

ANY_ORIGIN = "*"
INTERRUPT_GRACE_S: Final = 2.0
"""Seconds that running tasks may take to finish after Ctrl-C on a terminal (OR-14)."""
_EMPTY_TOKEN_DIGEST = hashlib.sha256(b"").hexdigest()
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", re.ASCII | re.IGNORECASE)


def sendable(token: SecretStr | None) -> SecretStr | None:
    """The token, None for an empty one. Raises ``ValueError`` if it cannot travel in a header."""
    if token is None or not token.get_secret_value():
        return None
    if not token.get_secret_value().isascii() or " " in token.get_secret_value():
        raise ValueError("only printable ASCII without spaces can travel in a header")
    return token


class KeySettings(Section):
    """One named key, with exactly one of ``token`` and ``token_sha256`` (hex).

    A limit that the key does not state is the one for every key; 0 means none.
    """

    token: SecretStr | None = None
    """Token that requests show: printable ASCII without spaces."""
    token_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    """SHA-256 of the token in hex, so that the token itself is not in the file."""
    requests_per_min: int | None = Field(default=None, ge=0)
    """Requests that may come with this key in a minute."""
    tokens_per_min: int | None = Field(default=None, ge=0)
    """Tokens of prompts and answers with this key in a minute."""
    concurrent: int | None = Field(default=None, ge=0)
    """Requests with this key in progress at a time."""
    tell_time: bool = False
    """Whether models are told how much of a request's time is left, unless it says otherwise."""
    names_tenants: bool = False
    """Whether requests may name a tenant; otherwise they all belong to the key's own tenant."""
    is_admin: bool = False
    """Whether the key may change how the service runs, as ``admin_token`` may."""

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        return sendable(value)

    @field_validator("token_sha256")
    @classmethod
    def _check_digest(cls, value: str | None) -> str | None:
        if value is not None and value.lower() == _EMPTY_TOKEN_DIGEST:
            raise ValueError("the digest of an empty token, which every client has")
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


class HealthSettings(Section):
    """A port for health checks alone."""

    port: int = Field(default=8081, ge=-1, le=65535)
    """Separate port for health checks, which no load delays (LB-4); no token, nothing else. −1:
    none. If the default is taken there is none, and the log says so."""


class HttpSettings(Section):
    """Clients' connections and requests."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body."""
    max_connections: int = Field(default=4096, ge=32)
    """Most open connections, fewer if open files are limited; three quarters from one address, the
    last 16 for health checks and operators."""
    idle_timeout_s: float = Field(default=90.0, gt=0)
    """A connection is closed after this long without a request."""
    strict_fields: bool = False
    """Whether OpenAI and Anthropic routes refuse unknown fields instead of naming them in
    ``x-tidegate-ignored``. Other routes always refuse them."""
    allowed_hosts: Names = ()
    """Host names other than loopback's that requests without a key may use in ``Host``,
    comma-separated; ``*``: any. Checked only while there is no key."""
    cors_origins: Names = ()
    """Web pages that may use the service: ``https://ui.example``, comma-separated; ``*``: all."""

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


class StreamSettings(Section):
    """Clients that read an answer as it is made."""

    keepalive_s: float = Field(default=15.0, ge=0)
    """Longest silence of an event stream before a comment is sent; 0: no limit (but one goes with
    the headers after a second without events)."""


class ModelSettings(Section):
    """Names and formats of models."""

    aliases: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Other names for models: ``gpt-4o=demo,claude-*=demo``, or ``[models.aliases]`` in
    tidegate.toml. A ``*`` at the end makes a prefix."""
    special_tokens_in_prompts: bool = False
    """Whether special tokens in the text of plain prompts (``/v1/completions``, ``prompt``) count,
    for clients that render chat templates themselves. Never in chats."""
    tool_format: Literal[
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        "qwen3_coder",
        "glm45",
        "minimax_m2",
        "deepseek",
        "harmony",
        "kimi_k2",
        "minimax_m3",
        "seed_oss",
        "gemma4",
        "functiongemma",
        "granite",
        "phi4_mini",
        "apriel",
    ] = "auto"
    """How the models write tool calls; ``auto`` derives it from each model's chat template."""
    reasoning_format: Literal[
        "auto", "none", "think", "think_brackets", "seed_think", "minimax_think"
    ] = "auto"
    """The tags of the models' thinking, such as ``<think>``; ``none``: all is content."""

    @field_validator("aliases", mode="before")
    @classmethod
    def _split_aliases(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        return {alias.strip(): model.strip() for alias, _, model in pairs}

    @field_validator("aliases")
    @classmethod
    def _check_aliases(cls, value: dict[str, str]) -> dict[str, str]:
        for alias, model in value.items():
            if not (alias and model) or "*" in alias[:-1]:
                raise ValueError(
                    f"expected ALIAS=MODEL, with * at the end of ALIAS only, got {alias}={model}"
                )
        return value


class LoadingSettings(Section):
    """Models that are loaded when they are asked for."""

    on_demand: bool = True
    """Whether a requested model that no instance serves is loaded by a worker that may load it
    (``TIDEGATE_WORKER__MODELS``)."""


class PlacementSettings(Section):
    """Choice of an instance for each task."""

    policy: str = ""
    """A CEL expression over ``task`` and ``instance``: a condition that instances must meet, or a
    number of which the smallest wins (OR-8). Empty: the built-in policy alone."""

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value:
            Policy.compile(value)
        return value


class DispatchSettings(Section):
    """Jobs on instances: how many run, how often one is tried."""

    row_policy: RowPolicy = RowPolicy.ADAPTIVE
    """How many rows an instance runs at once: as many as meet the most deadlines by the latest
    requests (``adaptive``), or as many as its worker has slots for (``fixed``)."""
    pause: bool = True
    """Whether a running job may be paused, its KV kept, so that a more urgent one gets its slot."""
    learn_runs: bool = True
    """Whether calls of one session or trace with the same deadline count as a run, with shares of
    the time by the usual number of calls (DL-22)."""
    hedge_share: float = Field(default=0.02, ge=0, le=0.02)
    """Largest share of offered requests that get a second attempt because their first token is
    late; 0: none."""


class AdmissionSettings(Section):
    """Refusal of work that will not finish in time."""

    mode: AdmissionMode = AdmissionMode.ENFORCE
    """Whether work that will miss its deadline is refused (``enforce``), only counted
    (``observe``), or neither (``off``) (DL-7)."""
    default_max_tokens: int = Field(default=256, ge=1)
    """``max_tokens`` of requests that state none, clipped to the context."""
    floor_ms: float = Field(default=10.0, ge=0)
    """Least time to its deadline that a request must have to be let in (DL-3)."""
    # At twice the capacity of traces, simulated, 0.1, 0.3 and 0.5 met 5,527, 5,521 and 5,430 of
    # 10,620; of the others 0.55, 0.62 and 0.71 heard within a tenth of their deadline. But with 0.3
    # refusals named deadlines 2.1 times as far away as the request then took, with 0.1 1.5.
    least_chance: float = Field(default=0.1, ge=0, le=1)
    """Least that a request must add to the expected number of met deadlines, on arrival and while
    it waits: its chance, minus half of the chances that others lose, also those who come during a
    long stay. ``0`` refuses only certain misses (DL-7)."""
    refusal_cap: float = Field(default=0.95, ge=0, le=1)
    """Largest share of recent work that is refused as infeasible (DL-7); beyond it everything is
    let in."""


class QueueSettings(Section):
    """Work that waits for an instance."""

    max_waiting: int = Field(default=100, ge=-1)
    """Most tasks that may wait for an instance; -1: unbounded (OR-4). If full, interactive work
    takes places of batch work, and tenants with few places those of tenants with more. A small
    bound tells clients early; a larger one meets more if answers are short compared with their
    deadlines."""
    when_full: QueuePolicy = QueuePolicy.REJECT
    """``reject`` refuses tasks without a place in a full queue; with ``drop-lru`` the oldest batch
    task makes room for any newer one."""
    order: QueueOrder = QueueOrder.SLACK
    """Order of the queue; ``deadline`` and ``fifo`` exist to compare with (DL-8)."""


class LimitSettings(Section):
    """Rate limits (OR-12). 0 is no limit; per-minute rates allow one minute's worth at once."""

    each_key: Limits = Limits()
    """Default limits of each key: requests per minute, tokens per minute, and requests in
    progress."""
    all_keys: Limits = Limits()
    """Limits of all keys together."""


def _by_default() -> Path | None:
    path = os.environ.get(JOURNAL_BY_DEFAULT)
    return Path(path) if path else None


class JournalSettings(Section):
    """Durable tasks, which outlive the process (OR-5)."""

    path: Path | None = Field(default_factory=_by_default)
    """File for tasks with ``durable: true``, on a local disk, for this orchestrator alone. Unset:
    ``TIDEGATE_HOME/journal/HOST-PORT.db`` if started by ``tidegate up``, else none. Empty: none."""
    loss_window_ms: float = Field(default=0.0, ge=0, le=10_000)
    """Window of accepted work that may be lost with the process; answers say so. 0: tasks are on
    disk before they are accepted."""
    keep_results_s: float = Field(default=86_400.0, ge=0, le=KEEP_OUTCOMES_S)
    """How long a durable task's text is kept after its end; its outcome is kept for a week."""

    @field_validator("path", mode="before")
    @classmethod
    def _check_path(cls, value: object) -> object:
        return None if value == "" else value


class ShutdownSettings(Section):
    """The end of the process (OR-14)."""

    grace_s: float = Field(default=30.0, ge=0)
    """How long running tasks may take to finish after SIGTERM."""


class TelemetrySettings(Section):
    """Log, metrics and traces."""

    log_format: LogFormat = "auto"
    """``json``, one object per line, or ``text``; ``auto``: text on a terminal, else JSON."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity of what is logged."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/?#\s]+[^?#\s]*$")
    """OTLP receiver that traces are sent to over HTTP, such as http://localhost:4318; unset: no
    traces. Needs the extra ``otel``."""
