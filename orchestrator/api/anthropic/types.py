"""The supported part of Anthropic's request bodies. Other fields are refused by name.

The additional fields are the same in every dialect (``GenerationRequest``).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from orchestrator.api.anthropic.shapes import ThreadUnsupported
from orchestrator.api.anthropic.turns import Content, InputMessage, turns_of
from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.field_errors import missing, wrong
from orchestrator.api.http.fields import (
    NULL,
    OtherFormsRequest,
    ServedValues,
    StatedGrammar,
    Unused,
    other_forms,
    refuse_unserved,
)
from orchestrator.api.http.grammars import stated_schema
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.tools import decode_tools, read_tool, template_arguments, use_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing.parser import ToolUse
from orchestrator.tasks.job import Chat, Prompt
from protocol import excerpt

_OF_CLIENTS = ("bash_", "computer_", "memory_", "text_editor_")


class MessagesToolBody(msgspec.Struct, frozen=True):
    """A tool. Supported tools are defined by the client and have a schema."""

    name: str = ""
    input_schema: msgspec.Raw = NULL
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    allowed_callers: Unused = NULL
    cache_control: Unused = NULL
    defer_loading: Unused = NULL
    eager_input_streaming: Unused = NULL
    input_examples: Unused = NULL


class ChoiceBody(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True):
    """Whether to think. A separate budget has no effect: ``max_tokens`` covers all output."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Unused = NULL
    display: Unused = NULL


_thread_reader: Reader[Any] = Reader(Any)
_tools_reader: Reader[list[MessagesToolBody] | None] = Reader(list[MessagesToolBody] | None)


def tool_use_of(stated_tools: msgspec.Raw, choice: ChoiceBody | None) -> ToolUse | None:
    """The tools that may be called; None if there are none. Raises ``InvalidRequest``."""
    stated: list[MessagesToolBody] | None = decode_tools(stated_tools, _tools_reader)
    tools = tuple(
        read_tool(tool.name, tool.description, tool.input_schema, tool.strict, f"tools[{at}]")
        for at, tool in enumerate(stated or ())
        if _is_served(tool, f"tools[{at}].type")
    )
    choice = choice or ChoiceBody("auto")
    must_call = choice.type in ("any", "tool")
    if not tools and must_call:
        raise InvalidRequest("tool_choice needs tools; send tools too", field="tool_choice")
    if not tools or choice.type == "none":
        return None
    only = choice.name if choice.type == "tool" else ""
    if choice.type == "tool" and not only:
        raise missing("tool_choice.name")
    is_parallel = not choice.disable_parallel_tool_use
    return use_of(tools, must_call=must_call, only=only, is_parallel=is_parallel)


def _is_served(tool: MessagesToolBody, where: str) -> bool:
    """Whether a tool can be called. Tools that run on Anthropic's servers are ignored. Raises
    ``InvalidRequest`` for client tools without a schema. Only Anthropic's models know them; the
    client would wait for calls that never come."""
    if tool.type in (None, "custom") or tool.input_schema != NULL:
        return True
    kind = excerpt(str(tool.type), 64)
    refusal = wrong(where, f"{kind} is not supported; send your own tools with an input_schema")
    if kind.startswith(_OF_CLIENTS):
        raise refusal
    pass_over("tools[]", f"type={kind}", refusal)
    return False


class FormatBody(msgspec.Struct, frozen=True):
    """A JSON Schema for the answer. The worker gets its text unchanged."""

    type: str
    schema: msgspec.Raw = NULL
    name: Unused = NULL


class OutputConfig(msgspec.Struct, frozen=True):
    """Output settings. ``effort`` has no effect."""

    format: FormatBody | None = None
    effort: Unused = NULL
    task_budget: Unused = NULL


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

    # only one value is supported
    mcp_servers: Unused = NULL
    container: Unused = NULL
    speed: Unused = NULL

    # accepted without effect
    metadata: Unused = NULL
    cache_control: Unused = NULL
    context_management: Unused = NULL
    inference_geo: Unused = NULL
    service_tier: Unused = NULL
    diagnostics: Unused = NULL
    thread: Unused = NULL
    user_profile_id: Unused = NULL
    workspace_id: Unused = NULL

    def must_think(self) -> bool:
        """Whether to refuse models that cannot think. Otherwise thinking is a hint."""
        return self.thinking is not None and self.thinking.type == "enabled"

    def stated_grammar(self) -> StatedGrammar | None:
        field, form = "output_format", self.output_format
        if self.output_config is not None and self.output_config.format is not None:
            field, form = "output_config.format", self.output_config.format
        if form is None:
            return None
        return stated_schema(field, form.type, form.schema, None, "json_schema")

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "stop": "stop_sequences"}


class CountTokensRequest(MessagesRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``: a message request that generates nothing."""

    max_tokens: int = 0


def refuse_unsupported(body: MessagesRequest) -> None:
    """Raise ``InvalidRequest`` for the first unsupported field."""
    thread = decode_part(body.thread, _thread_reader, "thread")
    # Only the messages of a new thread are the whole conversation.
    if isinstance(thread, dict) and thread.get("type") != "create":
        raise ThreadUnsupported(
            "conversations are not kept here between messages: send the whole conversation, "
            "without thread",
            field="thread",
        )
    refuse_unserved(body, _HINTS if isinstance(body, CountTokensRequest) else _ONLY)


def chat_of(body: MessagesRequest) -> tuple[Prompt, ToolUse | None]:
    """The conversation, and the tools that may be called. Raises ``InvalidRequest``."""
    use = tool_use_of(body.tools, body.tool_choice)
    arguments = dict(template_arguments(body.chat_template_kwargs))
    if body.thinking is not None:
        arguments.setdefault("enable_thinking", body.thinking.type != "disabled")
    turns = turns_of(body.system, body.messages)
    if use is None and not arguments:
        return turns, None
    return Chat(turns, template_arguments=arguments, tools=use.tools if use else ()), use


_HINTS = {
    **dict.fromkeys(
        ("mcp_servers", "container"), ServedValues("send your own tools instead", is_hint=True)
    ),
    "speed": ServedValues("expected standard", lambda value: value == "standard", is_hint=True),
}
_ONLY = {**other_forms("output_config.format"), **_HINTS}
"""Fields for which only some values are supported."""
