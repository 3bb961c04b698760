"""Tools of Anthropic's bodies, which of them may or must be called, and how much to think."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.tools import read_tool, require_bounds, require_known
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from orchestrator.tasks.job import TemplateArgument
from protocol import excerpt

_OF_CLIENTS = ("bash_", "computer_", "memory_", "text_editor_")


class MessagesToolBody(msgspec.Struct, frozen=True):
    """A tool. Only tools that the client defines, with a schema, are served."""

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
    """Whether to think. A separate budget is not honored: ``max_tokens`` covers everything."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Unused = NULL
    display: Unused = NULL


_tools_reader: Reader[list[MessagesToolBody] | None] = Reader(list[MessagesToolBody] | None)


def tool_use_of(stated_tools: msgspec.Raw, choice: ChoiceBody | None) -> ToolUse | None:
    """The tools that may be called; None without any. Raises ``InvalidRequest``."""
    require_bounds(stated_tools)
    stated: list[MessagesToolBody] | None = decode_part(stated_tools, _tools_reader, "tools")
    tools = tuple(
        read_tool(tool.name, tool.description, tool.input_schema, tool.strict, f"tools[{at}]")
        for at, tool in enumerate(stated or ())
        if _is_served(tool, f"tools[{at}].type")
    )
    kind = "auto" if choice is None else choice.type
    if not tools and kind in ("any", "tool"):
        raise InvalidRequest("tool_choice: there are no tools to call", field="tool_choice")
    if not tools or kind == "none":
        return None
    only = choice.name if choice is not None and kind == "tool" else ""
    if kind == "tool" and not only:
        raise InvalidRequest("tool_choice.name is required", field="tool_choice.name")
    one = choice is not None and bool(choice.disable_parallel_tool_use)
    use = ToolUse(tools, kind in ("any", "tool"), only, bool(only) or one)
    require_known(use)
    return use


def _is_served(tool: MessagesToolBody, where: str) -> bool:
    """Whether a tool can be called. Tools that run on Anthropic's servers are ignored. Raises
    ``InvalidRequest`` for client tools without a schema, which only Anthropic's models know: the
    client would wait for calls that never come."""
    if tool.type in (None, "custom") or tool.input_schema != NULL:
        return True
    kind = excerpt(str(tool.type), 64)
    refusal = InvalidRequest(
        f"{where}: {kind} is not served here; send tools of your own, with an input_schema",
        field=where,
    )
    if kind.startswith(_OF_CLIENTS):
        raise refusal
    pass_over("tools[]", f"type={kind}", refusal)
    return False


class Thinking(NamedTuple):
    """How much a model is to think."""

    arguments: Mapping[str, TemplateArgument]
    """Arguments for a chat template that can both think and not think."""
    is_required: bool
    """Whether a model that cannot think is refused; otherwise thinking is a hint."""


def thinking_of(stated: ThinkingBody | None) -> Thinking:
    """How much to think, as a body states it."""
    if stated is None:
        return Thinking({}, is_required=False)
    thinks = {"enable_thinking": stated.type != "disabled"}
    return Thinking(thinks, is_required=stated.type == "enabled")
