"""Anthropic's request bodies, as far as they are served here; the rest is refused by name.

Additional fields are those of every other dialect (``GenerationRequest``).
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from orchestrator.api.anthropic.shapes import ThreadUnsupported
from orchestrator.api.anthropic.tools import ChoiceBody, ThinkingBody, thinking_of, tool_use_of
from orchestrator.api.anthropic.turns import Content, InputMessage, turns_of
from orchestrator.api.http.fields import (
    NULL,
    OtherFormsRequest,
    ServedValues,
    StatedGrammar,
    Unused,
    nothing,
    other_forms,
    refuse_unserved,
)
from orchestrator.api.http.grammars import json_schema
from orchestrator.api.http.tools import template_arguments
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from orchestrator.tasks.job import Chat, Prompt


class FormatBody(msgspec.Struct, frozen=True):
    """A JSON Schema for the answer; its text goes to the worker as it came."""

    type: str
    schema: msgspec.Raw = NULL
    name: Unused = NULL


class OutputConfig(msgspec.Struct, frozen=True):
    """Output settings. The effort to make is a hint that nothing here depends on."""

    format: FormatBody | None = None
    effort: Unused = NULL
    task_budget: Unused = NULL


def stated_form(config: OutputConfig | None, form: FormatBody | None) -> StatedGrammar | None:
    """The grammar that the answer must match, if one is stated. Raises ``InvalidRequest``."""
    field = "output_format"
    if config is not None and config.format is not None:
        field, form = "output_config.format", config.format
    if form is None:
        return None
    if form.type != "json_schema":
        raise InvalidRequest(
            f"{field}: type {form.type[:32]!r} is not supported; expected json_schema", field=field
        )
    if form.schema == NULL:
        raise InvalidRequest(f"{field}: json_schema needs schema", field=field)
    return StatedGrammar(field, json_schema(field, form.schema, None))


class MessagesRequest(OtherFormsRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages``."""

    cuts_max_tokens: ClassVar[bool] = True

    messages: list[InputMessage]
    max_tokens: int
    system: Content | None = None
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    stream: bool | None = None

    tools: Unused = NULL
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingBody | None = None
    chat_template_kwargs: Unused = NULL
    output_config: OutputConfig | None = None
    output_format: FormatBody | None = None

    # served in one way only
    mcp_servers: Unused = NULL
    container: Unused = NULL
    speed: Unused = NULL

    # harmless
    metadata: Unused = NULL
    cache_control: Unused = NULL
    context_management: Unused = NULL
    inference_geo: Unused = NULL
    service_tier: Unused = NULL
    diagnostics: Unused = NULL
    thread: Unused = NULL
    user_profile_id: Unused = NULL
    workspace_id: Unused = NULL

    def wanted_logprobs(self) -> int | None:
        return None

    def stated_grammar(self) -> StatedGrammar | None:
        return stated_form(self.output_config, self.output_format)

    def wants_one_piece(self) -> bool:
        return not self.stream

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "stop": "stop_sequences"}


class CountTokensRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: list[InputMessage]
    system: Content | None = None

    tools: Unused = NULL
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingBody | None = None
    chat_template_kwargs: Unused = NULL

    # served in one way only
    mcp_servers: Unused = NULL
    speed: Unused = NULL

    output_config: Unused = NULL
    output_format: Unused = NULL
    cache_control: Unused = NULL
    context_management: Unused = NULL
    thread: Unused = NULL
    user_profile_id: Unused = NULL
    workspace_id: Unused = NULL


def refuse_unsupported(body: MessagesRequest | CountTokensRequest) -> None:
    """Raise ``InvalidRequest`` for the first unsupported field."""
    _require_whole_conversation(body.thread)
    refuse_unserved(body, _ONLY)


def _require_whole_conversation(thread: msgspec.Raw) -> None:
    """Raise ``ThreadUnsupported`` if the messages are only the new part of a conversation that the
    server should have kept. One that begins (``{"type": "create"}``) has all of its messages."""
    try:
        stated = msgspec.json.decode(thread, type=_Thread)
    except msgspec.ValidationError:  # not an object: it names no conversation
        return
    if bytes(stated.type) != b'"create"':
        raise ThreadUnsupported(
            "conversations are not kept here between messages: send the whole conversation, "
            "without thread",
            field="thread",
        )


class _Thread(msgspec.Struct):
    type: msgspec.Raw = NULL


def chat_of(body: "MessagesRequest | CountTokensRequest") -> tuple[Prompt, ToolUse | None]:
    """The conversation, and those of its tools that may be called. Raises ``InvalidRequest``."""
    use = tool_use_of(body.tools, body.tool_choice)
    arguments = dict(thinking_of(body.thinking).arguments)
    arguments |= template_arguments(body.chat_template_kwargs)
    turns = turns_of(body.system, body.messages)
    if use is None and not arguments:
        return turns, None
    return Chat(turns, template_arguments=arguments, tools=use.tools if use else ()), use


_ONLY = {
    **other_forms("output_config.format"),
    "mcp_servers": ServedValues(nothing, "tools of servers are not served", is_hint=True),
    "container": ServedValues(nothing, "tools of servers are not served", is_hint=True),
    "speed": ServedValues(
        lambda value: value == "standard", "there is one, standard", is_hint=True
    ),
}
"""Fields of which only some values are served."""
