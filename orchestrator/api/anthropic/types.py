"""Anthropic's request bodies, as far as they are served here; what is not is refused by name.

What a body may say beyond its API is the same as in every other dialect (``GenerationRequest``).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from orchestrator.api.http.fields import NULL, GenerationRequest, Unused, refuse_unserved
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message, Prompt

_BETWEEN_TURNS = "\n\n"


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type", gc=False):
    """The only kind of content block that is served. Prefixes are cached whether or not a
    ``cache_control`` asks for it."""

    text: str


Content = str | tuple[TextBlock, ...]


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn. A body may have so many that the collector would be the dearest part."""

    role: Literal["user", "assistant"]
    content: Content


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks, in the client's own books; nothing here depends on it."""

    user_id: str | None = None


class MessagesRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages``."""

    model: str
    messages: list[InputMessage]
    max_tokens: int
    system: Content | None = None
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    stream: bool | None = None
    metadata: Metadata | None = None

    # served in one way only
    tools: Unused = NULL
    tool_choice: Unused = NULL
    thinking: Unused = NULL
    mcp_servers: Unused = NULL
    container: Unused = NULL
    output_config: Unused = NULL
    output_format: Unused = NULL
    speed: Unused = NULL

    # harmless
    cache_control: Unused = NULL
    context_management: Unused = NULL
    inference_geo: Unused = NULL
    service_tier: Unused = NULL
    diagnostics: Unused = NULL
    user_profile_id: Unused = NULL
    workspace_id: Unused = NULL

    def prompt_of(self) -> Prompt:
        return chat_of(self.system, self.messages)

    def wanted_logprobs(self) -> int | None:
        return None

    def wants_one_piece(self) -> bool:
        return not self.stream

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "stop": "stop_sequences"}


class CountTokensRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[InputMessage]
    system: Content | None = None

    tools: Unused = NULL
    tool_choice: Unused = NULL
    thinking: Unused = NULL
    mcp_servers: Unused = NULL
    output_config: Unused = NULL
    output_format: Unused = NULL
    speed: Unused = NULL

    cache_control: Unused = NULL
    context_management: Unused = NULL
    user_profile_id: Unused = NULL
    workspace_id: Unused = NULL


def refuse_unsupported(body: MessagesRequest | CountTokensRequest) -> None:
    """Raise ``InvalidRequest`` for the first field that asks for what is not served."""
    refuse_unserved(body, _ONLY)


def chat_of(system: Content | None, messages: Sequence[InputMessage]) -> tuple[Message, ...]:
    """A chat of alternating turns; an assistant's last one is gone on with.

    Blocks of one turn are joined as they are, turns of one role that follow each other with an
    empty line between.
    """
    if not messages:
        raise InvalidRequest("messages is empty; it needs at least one", field="messages")
    turns = [
        Message(role, _BETWEEN_TURNS.join([_text_of(message.content) for message in group]))
        for role, group in groupby(messages, key=lambda message: message.role)
    ]
    last = turns[-1]
    if last.role == "assistant":
        if last.content != last.content.rstrip():
            raise InvalidRequest(
                "messages: the last one is the assistant's, with which the model goes on: it must "
                "not end with whitespace",
                field="messages",
            )
        turns[-1] = Message(last.role, last.content, is_open=True)
    instructions = "" if system is None else _text_of(system)
    return (Message("system", instructions), *turns) if instructions else tuple(turns)


def _text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join([block.text for block in content])


def _nothing(value: object) -> bool:
    return not value


def _is_of_type(*types: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and value.get("type") in types


_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_nothing, "tools are not served"),
    "tool_choice": (_is_of_type("none", "auto"), "tools are not served"),
    "thinking": (_is_of_type("disabled"), "leave it out, or send type: disabled"),
    "mcp_servers": (_nothing, "tools are not served"),
    "container": (_nothing, "tools are not served"),
    "output_config": (_nothing, "only text is served"),
    "output_format": (_nothing, "only text is served"),
    "speed": (lambda value: value == "standard", "there is one speed, standard"),
}
"""Fields of which one value is served: the test for it, and what to say otherwise."""
