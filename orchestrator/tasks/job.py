"""A client's request in one form for all API dialects."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts
from orchestrator.tasks.image import Image, Part, text_in
from orchestrator.telemetry.trace_context import TraceContext
from protocol import Feature, Grammar, OnDeadline, Sampling

JsonObject = Mapping[str, object]


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may see. ``parameters`` is a JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: JsonObject | None = None
    strict: bool = False
    """Whether a grammar makes its arguments match the schema."""
    chars: int = 0
    """Approximate length of the tool as JSON, in characters."""
    is_free_text: bool = False
    """Whether clients get the text of its only argument instead of arguments."""

    def stated(self) -> JsonObject:
        """The tool in the form that templates expect."""
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    arguments: JsonObject
    chars: int = 0
    """Approximate length of the call as JSON, in characters."""

    def stated(self, *, in_text: bool = False) -> JsonObject:
        """The call in the form for templates: arguments are an object unless ``in_text``."""
        text = json.dumps(self.arguments, ensure_ascii=False) if in_text else ""
        function = {"name": self.name, "arguments": text or self.arguments}
        return {"id": self.id, "type": "function", "function": function}


ROOM_FIELDS: Final = ("max_run_tokens", "max_run_cost")
"""Fields of a ``Job`` that have no effect without an optional room that implements them."""
IDLE_KEEP_S: Final = 30.0
"""``idle_keep_s`` of conversations that state none."""
MAX_IDLE_KEEP_S: Final = 600.0
"""Longest ``idle_keep_s`` in seconds that a client may ask for."""


class Api(StrEnum):
    """The API that a request came through."""

    NATIVE = "tasks"
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


class OnDisconnect(StrEnum):
    """Handling of a task when its client disconnects (WP-1)."""

    CANCEL = "cancel"
    CONTINUE = "continue"


class Priority(StrEnum):
    """Classes of the queue: batch work waits while interactive work waits (DL-8)."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class PlacementMode(StrEnum):
    """Meaning of the instances that a client names (OR-7)."""

    AUTO = "auto"
    PIN = "pin"
    """One of the named instances, or no instance."""
    PREFER = "prefer"
    """One of the named instances if possible."""
    AVOID = "avoid"
    """Any but the named instances."""


@dataclass(frozen=True, slots=True)
class PlacementConstraint:
    """Constraint on where a task runs; ``instances`` are the registry's names.

    All other fields are compared with an instance's own report: a property that it does not report
    counts as missing.
    """

    mode: PlacementMode = PlacementMode.AUTO
    instances: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()
    """Acceptable quantizations, in the engines' words; empty for any."""
    vram_bytes: int = 0
    """Minimum GPU memory in bytes."""
    compute_capability: tuple[int, int] = (0, 0)
    """Minimum CUDA compute capability."""
    capabilities: frozenset[Feature] = frozenset()
    """Features needed in addition to the request's own."""

    def allows(self, instance: str) -> bool:
        if self.mode is PlacementMode.PIN:
            return instance in self.instances
        return self.mode is not PlacementMode.AVOID or instance not in self.instances


class Message(msgspec.Struct, frozen=True, gc=False):
    """One turn of a chat. There may be a hundred thousand, so garbage collection skips them."""

    role: str
    content: str
    is_open: bool = False
    """Whether the model continues this turn instead of answering it; only the last turn may be
    open."""
    calls: tuple[ToolCall, ...] = ()
    """Calls that the model made in this turn, which is its own."""
    reasoning: str = ""
    call_id: str = ""
    """Id of the call whose result this turn is; empty for any other turn."""
    name: str = ""
    """Name of the tool whose result this turn is."""
    parts: tuple[Part, ...] = ()
    """Text and images of this turn in order, if it has images; ``content`` is then only the
    text."""

    @property
    def images(self) -> list[Image]:
        return [part for part in self.parts if isinstance(part, Image)]


def said_by(role: str, parts: Sequence[Part]) -> Message:
    has_images = any(isinstance(part, Image) for part in parts)
    return Message(role, text_in(parts), parts=tuple(parts) if has_images else ())


TemplateArgument = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat and the other inputs of its template."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    """Whether the model's turn is next. Not needed after an open last message."""
    template_arguments: Mapping[str, TemplateArgument] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()


Written = str | tuple[int, ...] | tuple[Message, ...]
"""A prompt of the native API: a text, token ids, or the turns of a chat."""
Prompt = Written | Chat


class PromptEnd(NamedTuple):
    """A grammar to use instead if the prompt ends with ``tag``, one of the tags around a model's
    thinking."""

    tag: str
    grammar: Grammar


class TellTime(NamedTuple):
    """How the model is told the remaining time (``prompts.time_left``)."""

    wind_down: float = 0.2
    """Share of the time left at which it is told to finish."""
    tools_until: float = 0.0
    """Share of the time left below which it is shown no tools."""
    is_asked: bool = True
    """Whether the request asks for it, and not only its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The common part of clients' requests for all work."""

    deadline: Deadline
    correlation_id: str
    arrived: float
    """When the request's headers were read, in seconds of the clock."""
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    key: str = ""
    """Fingerprint of the client's token, for logs."""
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Stated):
    """A client's request, the same for all API dialects, without the prompt itself.

    ``model`` is empty if the client leaves the choice to the service. ``sampling.max_tokens`` is
    meaningless while ``max_tokens`` is None: admission then fits it to the context. The model's
    defaults apply to the ``unstated`` fields of ``sampling``.
    """

    api: Api
    model: str
    sampling: Sampling
    unstated: tuple[str, ...] = ()
    max_tokens: int | None
    request_id: str = ""
    """The client's additional name for the request; the answer repeats it."""
    parts: Parts = NO_PARTS
    default_max_tokens: int | None = None
    """Maximum tokens if ``max_tokens`` is None; None leaves it to the operator."""
    cuts_max_tokens: bool = False
    """Whether ``max_tokens`` is cut to fit into the context instead of being refused."""
    on_deadline: OnDeadline = OnDeadline.ERROR
    keep: bool = False
    """Whether to keep the text for status and replay."""
    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    """Tenant whose share pays for it; by default the key's name."""
    session_id: str = ""
    """The conversation that it belongs to; empty if none."""
    idle_keep_s: float = 0.0
    """Seconds for which the conversation's KV is kept for the next turn after this one ends."""
    states_idle_keep: bool = False
    """Whether the client stated ``idle_keep_s``."""
    calls_left: int | None = None
    """Number of later calls of its run if stated by the client (``runs``)."""
    max_run_tokens: int = 0
    """Maximum tokens of prompts and answers of all calls of its run; 0: unstated."""
    max_run_cost: float = 0.0
    """Maximum cost of all calls of its run; 0: unstated."""
    shares_calls: bool = False
    """Whether ``calls_left`` comes from its run, which handles parallel calls."""
    tell_time: TellTime | None = None
    run_began: float | None = None
    """When the first call of its run arrived, in seconds of the clock; None if unknown."""
    placement: PlacementConstraint = PlacementConstraint()
    grammar: Grammar | None = None
    """Grammar that the whole text of the answer must match, from its first token; the grammar
    includes thinking before it."""
    prompt_ends: tuple[PromptEnd, ...] = ()
    """Grammars to use instead if the prompt begins or ends the model's thinking."""
    durable: bool = False
    """Whether it is journaled before it is accepted, and survives the orchestrator (OR-5)."""
    idempotent: bool = False
    """Whether its text may be regenerated after a restart if it cannot be continued exactly."""
    idempotency_key: str = ""
    body_digest: bytes = b""
    needs_ids: bool = False
    """Whether it needs the ids of its tokens: they are returned to the client or form the next
    turn's prompt."""
