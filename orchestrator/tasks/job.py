"""What a client asks for, the same from every dialect."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts
from orchestrator.tasks.tools import Tool, ToolCall
from orchestrator.telemetry.trace_context import TraceContext
from worker.protocol import Feature, Grammar, OnDeadline, Sampling


class Api(StrEnum):
    """Which door a request came through."""

    NATIVE = "tasks"
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    KSERVE = "kserve"
    EMBEDDINGS = "embeddings"


class OnDisconnect(StrEnum):
    """What becomes of a task when its client goes away (WP-1)."""

    CANCEL = "cancel"
    CONTINUE = "continue"


class Priority(StrEnum):
    """Classes of the queue: batch work waits while interactive work does (DL-8)."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class PlacementMode(StrEnum):
    """What the instances that a client names mean (OR-7)."""

    AUTO = "auto"
    """Any instance."""
    PIN = "pin"
    """One of these, or none."""
    PREFER = "prefer"
    """One of these where possible."""
    AVOID = "avoid"
    """None of these."""


@dataclass(frozen=True, slots=True)
class PlacementConstraint:
    """Where a client wants its task to run; ``instances`` are named as the registry names them.

    What else it asks for is asked of what an instance tells of itself: one that does not say has
    none of it.
    """

    mode: PlacementMode = PlacementMode.AUTO
    instances: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()
    """One of these, in the engines' words; empty for any."""
    vram_bytes: int = 0
    """At least so much memory of GPUs."""
    compute_capability: tuple[int, int] = (0, 0)
    """At least this of CUDA's."""
    capabilities: frozenset[Feature] = frozenset()
    """Beside those that the request itself needs."""

    def allows(self, instance: str) -> bool:
        """Whether the task may run there at all, by the instance's name."""
        if self.mode is PlacementMode.PIN:
            return instance in self.instances
        return self.mode is not PlacementMode.AVOID or instance not in self.instances


class Message(msgspec.Struct, frozen=True, gc=False):
    """One turn of a chat. There may be a hundred thousand, which the collector need not visit."""

    role: str
    content: str
    is_open: bool = False
    """The last one may be: the model goes on with it, rather than answer it."""
    calls: tuple[ToolCall, ...] = ()
    """What the model called in this turn of its own."""
    reasoning: str = ""
    """What it thought before it called."""
    call_id: str = ""
    """This turn is what came of that call."""
    name: str = ""
    """The tool that was called, where this is what came of it."""


TemplateArgument = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat with what its template is told beside the messages."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    """The model's turn is next. An open last message needs no such thing."""
    template_arguments: Mapping[str, TemplateArgument] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    """What the model may call."""


Prompt = str | tuple[int, ...] | tuple[Message, ...] | Chat
"""Text, token ids, or a chat."""


class BegunThought(NamedTuple):
    """What an answer must match that begins within what the model thinks."""

    tag: str
    """With which the prompt ends then."""
    grammar: Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client asks for, the same from every dialect; all but the prompt itself.

    ``model`` is empty where the client leaves it to us. ``sampling.max_tokens`` means nothing
    while ``max_tokens`` is None: admission then fits it to the context. Of what is ``unstated`` in
    ``sampling``, the model's defaults count.
    """

    api: Api
    model: str
    sampling: Sampling
    unstated: tuple[str, ...] = ()
    max_tokens: int | None
    deadline: Deadline
    correlation_id: str
    request_id: str = ""
    """Another name of the client's own for the request, which its answer repeats."""
    arrived: float
    """When the request's head was read, in seconds of the clock."""
    parts: Parts = NO_PARTS
    """Deadlines for parts of the answer (DL-14)."""
    default_max_tokens: int | None = None
    """How many are generated where ``max_tokens`` is None; None leaves that to the operator."""
    cuts_max_tokens: bool = False
    """``max_tokens`` is cut to what the context holds, rather than refused."""
    on_deadline: OnDeadline = OnDeadline.ERROR
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    keep: bool = False
    """Keep the text for status and replay."""
    key: str = ""
    """Fingerprint of the client's token, for logs."""
    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    """Whose share of the service this uses; the name of the key where the client states none."""
    session_id: str = ""
    """The conversation that this belongs to, empty for none."""
    idle_keep_s: float = 0.0
    """How long its KV is kept for the next turn, once this one is over."""
    states_idle_keep: bool = False
    """The client has said so itself."""
    calls_left: int | None = None
    """Calls that its run will still make after this one, where the client says so (``runs``)."""
    placement: PlacementConstraint = PlacementConstraint()
    trace: TraceContext | None = None
    """What this is part of, by the client's ``traceparent``."""
    embeds: bool = False
    """Its prompt's embedding is asked for, and no text."""
    grammar: Grammar | None = None
    """What the whole text of the answer must match, from its first token on."""
    begun_thought: BegunThought | None = None
    """What it must match instead, where the prompt leaves the model in its thoughts."""
    durable: bool = False
    """It is written down before it is taken on, and outlives the orchestrator (OR-5)."""
    idempotent: bool = False
    """Its text may be made anew where it cannot be continued exactly after that."""
    idempotency_key: str = ""
    """The client's own name for the submission."""
    body_digest: bytes = b""
    """Of what was submitted by that name."""
    needs_ids: bool = False
    """Of no use without the ids of its tokens: they are told to the client, or the next turn's
    prompt is made of them."""
