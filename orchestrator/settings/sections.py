"""The tables of the orchestrator's settings. Most have the name of a package.

A package that uses its table directly also defines it: ``LaneConfig``, ``DeadlineConfig``,
``Limits``.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from catalog.paths import JOURNAL_BY_DEFAULT
from orchestrator.admission.rate_limits import Limits
from orchestrator.placement.policy import Policy
from orchestrator.prediction.feasibility import REFUSAL_SAMPLE, AdmissionMode, FeasibilityConfig
from orchestrator.queue.order import QueueOrder, QueuePolicy, RowPolicy
from orchestrator.tasks.journal.file import JournalConfig
from orchestrator.tasks.journal.store import KEEP_OUTCOMES_S, JournalTerms
from orchestrator.telemetry.log import LogFormat
from worker.environment import Names, Section

ANY_ORIGIN = "*"
INTERRUPT_GRACE_S: Final = 2.0
"""Seconds that running tasks have to finish after Ctrl-C on a terminal (OR-14)."""
_EMPTY_TOKEN_DIGEST = hashlib.sha256(b"").hexdigest()
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", re.ASCII | re.IGNORECASE)


def _sendable(token: SecretStr | None) -> SecretStr | None:
    """The token; None if it is empty. Raises ``ValueError`` if it is not valid in a header."""
    if token is None or not token.get_secret_value():
        return None
    if not token.get_secret_value().isascii() or " " in token.get_secret_value():
        raise ValueError("a token is sent in a header: use printable ASCII without spaces")
    return token


Token = Annotated[SecretStr | None, AfterValidator(_sendable)]
"""A secret that requests send; None if it is unset or empty."""


class KeySettings(Section):
    """One named key, with exactly one of ``token`` and ``token_sha256`` (hex).

    An unset limit defaults to the limit for every key (``limits.each_key``); 0 means no limit.
    """

    token: Token = None
    """Token that requests send: printable ASCII without spaces."""
    token_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    """SHA-256 of the token in hex. Keeps the token itself out of the file."""
    requests_per_min: int | None = Field(default=None, ge=0)
    """Most requests per minute with this key."""
    tokens_per_min: int | None = Field(default=None, ge=0)
    """Most prompt and answer tokens per minute with this key."""
    concurrent: int | None = Field(default=None, ge=0)
    """Most requests in progress at a time with this key."""
    tell_time: bool = False
    """Whether the model is told the time left for a request. A request can override this."""
    names_tenants: bool = False
    """Whether requests may name a tenant. Otherwise they belong to the key's own tenant."""
    is_admin: bool = False
    """Whether the key may change how the service runs, as ``admin_token`` may."""

    @field_validator("token_sha256")
    @classmethod
    def _check_digest(cls, value: str | None) -> str | None:
        if value is not None and value.lower() == _EMPTY_TOKEN_DIGEST:
            raise ValueError("this is the digest of an empty token; use a token that is not empty")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> "KeySettings":
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("expected exactly one of token and token_sha256")
        return self

    @property
    def digest_hex(self) -> str:
        """SHA-256 of the token, in lower-case hex."""
        if self.token is not None:
            return hashlib.sha256(self.token.get_secret_value().encode()).hexdigest()
        assert self.token_sha256 is not None
        return self.token_sha256.lower()


class HealthSettings(Section):
    """A separate port for health checks."""

    port: int = Field(default=8081, ge=-1, le=65535)
    """Port that serves only health checks, without a token and without delay under load (LB-4).
    −1: no such port. If the default port is in use, the service logs that and runs without it."""


class HttpSettings(Section):
    """Clients' connections and requests."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body."""
    max_connections: int = Field(default=4096, ge=32)
    """Most open connections; the limit of open files may lower it. One address gets three quarters
    of them. The last 16 are reserved for health checks and operators."""
    idle_timeout_s: float = Field(default=90.0, gt=0)
    """Time without a request after which the service closes a connection."""
    strict_fields: bool = False
    """Whether OpenAI and Anthropic routes refuse unknown fields. Otherwise they ignore the fields
    and name them in ``x-tidegate-ignored``. Other routes always refuse unknown fields."""
    allowed_hosts: Names = ()
    """Host names, besides loopback names, that requests may have in ``Host``; comma-separated.
    ``*``: any. Checked only while there is no key."""
    cors_origins: Names = ()
    """Origins of web pages that may use the service: ``https://ui.example``, comma-separated; or
    ``*``."""

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
    """Streamed answers."""

    keepalive_s: float = Field(default=15.0, ge=0)
    """Longest time without an event before the stream sends a comment; 0: no limit. The headers
    carry a comment anyway if the first second brings no event."""


class ModelSettings(Section):
    """Model names and output formats."""

    aliases: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Other names for models: ``gpt-4o=demo,claude-*=demo``, or ``[models.aliases]`` in
    tidegate.toml. An alias that ends in ``*`` matches all names with that prefix."""
    special_tokens_in_prompts: bool = False
    """Whether the text of a plain prompt (``/v1/completions``, ``prompt``) may contain special
    tokens, for clients that render chat templates themselves. Chats never may contain them."""
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
        "kimi_k2",
        "gemma4",
        "granite",
    ] = "auto"
    """Format of the models' tool calls; ``auto`` derives it from each model's chat template."""
    reasoning_format: Literal["auto", "none", "think", "think_brackets"] = "auto"
    """Tags around the models' thinking, such as ``<think>``; ``none``: all output is content."""

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
    """Loading of models on request."""

    on_demand: bool = True
    """Whether a request for a model that no instance serves makes a worker load the model. The
    worker's ``TIDEGATE_WORKER__MODELS`` must allow it."""


class PlacementSettings(Section):
    """Choice of an instance for each task."""

    policy: str = ""
    """A CEL expression over ``task`` and ``instance``: a condition that instances must meet, or a
    number; the instance with the smallest number wins (OR-8). Empty: only the built-in policy."""

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value:
            Policy.compile(value)
        return value


class DispatchSettings(Section):
    """Jobs on instances: how many run at once, and what may pause them; runs of calls."""

    row_policy: RowPolicy = RowPolicy.ADAPTIVE
    """How many rows an instance runs at once. ``adaptive``: the number that meets the most
    deadlines, judged by the latest requests. ``fixed``: the number of its worker's slots."""
    pause: bool = True
    """Whether a more urgent job may pause a running job and take its slot. The KV stays; where
    memory does not hold both, a job without a token starts again later."""
    learn_runs: bool = True
    """Whether calls of one session or trace with the same deadline count as one run. Each call
    then gets a share of the time, based on the usual number of calls (DL-22)."""


class AdmissionSettings(Section):
    """Refusal of work that would miss its deadline."""

    mode: AdmissionMode = AdmissionMode.ENFORCE
    """Whether to refuse work that will miss its deadline (``enforce``), only count it
    (``observe``), or do neither (``off``) (DL-7)."""
    default_max_tokens: int = Field(default=256, ge=1)
    """``max_tokens`` of requests that do not state it, clipped to the context."""
    floor_ms: float = Field(default=10.0, ge=0)
    """Least time until its deadline that a request needs to be admitted (DL-3)."""
    # Simulated at twice the capacity of traces, 0.1, 0.3 and 0.5 met 5,527, 5,521 and 5,430 of
    # 10,620 deadlines. 0.55, 0.62 and 0.71 of the rest were told within a tenth of their deadline.
    # The deadline in a refusal was 2.1 times the time the request then took at 0.3, 1.5 at 0.1.
    least_chance: float = Field(default=0.1, ge=0, le=1)
    """Least gain in expected met deadlines for a request to be admitted and to keep waiting. The
    gain is its own chance minus half of the chances that other requests lose, including requests
    that arrive during a long stay. ``0`` refuses only certain misses (DL-7)."""
    refusal_cap: float = Field(default=0.95, ge=0, le=1)
    """Largest share of recent work that may be refused as infeasible (DL-7). Above it, the service
    admits everything."""

    @property
    def feasibility(self) -> FeasibilityConfig:
        return FeasibilityConfig(
            mode=self.mode,
            least_chance=self.least_chance,
            refusal_cap=self.refusal_cap,
            sample=REFUSAL_SAMPLE,
        )


class QueueSettings(Section):
    """The queue of tasks that wait for an instance."""

    max_waiting: int = Field(default=100, ge=-1)
    """Most tasks that may wait for an instance; -1: unbounded (OR-4). In a full queue, interactive
    tasks replace batch tasks, and tenants with few places take those of tenants with more. A small
    bound refuses early. A larger bound meets more deadlines if answers are short compared with
    their deadlines."""
    when_full: QueuePolicy = QueuePolicy.REJECT
    """Policy of a full queue: ``reject`` refuses tasks that get no place; ``drop-lru`` drops the
    oldest batch task for any newer task."""
    order: QueueOrder = QueueOrder.SLACK
    """Order of the queue. ``deadline`` and ``fifo`` are for comparison (DL-8)."""


class LimitSettings(Section):
    """Rate limits (OR-12); 0 means no limit. Per-minute rates allow bursts of a minute's worth."""

    each_key: Limits = Limits()
    """Default limits of each key: requests per minute, tokens per minute, requests in progress."""
    all_keys: Limits = Limits()
    """Limits of all keys together."""


def _by_default() -> Path | None:
    path = os.environ.get(JOURNAL_BY_DEFAULT)
    return Path(path) if path else None


class JournalSettings(Section):
    """Durable tasks, which survive the process (OR-5)."""

    path: Path | None = Field(default_factory=_by_default)
    """File of tasks with ``durable: true``: on a local disk, used only by this orchestrator. Unset:
    ``TIDEGATE_HOME/journal/HOST-PORT.db`` under ``tidegate up``, else no file. Empty: no file."""
    loss_window_ms: float = Field(default=0.0, ge=0, le=10_000)
    """Window of accepted work that a crash may lose; answers state it. 0: the service accepts a
    task only after it is on disk."""
    keep_results_s: float = Field(default=86_400.0, ge=0, le=KEEP_OUTCOMES_S)
    """How long to keep a durable task's text after its end. Its outcome is kept for a week."""

    @field_validator("path", mode="before")
    @classmethod
    def _check_path(cls, value: object) -> object:
        return None if value == "" else value

    @property
    def terms(self) -> JournalTerms:
        return JournalTerms(self.loss_window_ms, self.keep_results_s)

    @property
    def config(self) -> JournalConfig | None:
        """Configuration of the journal of durable tasks; None if there is no journal."""
        return None if self.path is None else JournalConfig(self.path, self.terms)


class ShutdownSettings(Section):
    """Shutdown of the process (OR-14)."""

    grace_s: float = Field(default=30.0, ge=0)
    """Time that running tasks have to finish after SIGTERM."""


class TelemetrySettings(Section):
    """Log, metrics and traces."""

    log_format: LogFormat = "auto"
    """``json`` (one object per line) or ``text``. ``auto``: text on a terminal, else JSON."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/?#\s]+[^?#\s]*$")
    """OTLP receiver of traces over HTTP, such as http://localhost:4318. Unset: no traces. Needs the
    extra ``otel``."""
