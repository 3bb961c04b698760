"""Tools in OpenAI's chat bodies, and which of them may or must be called."""

from collections.abc import Set
from typing import Literal

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.tools import read_tool, require_bounds, require_known
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from orchestrator.tasks.tools import Tool
from protocol import excerpt


class FunctionBody(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True):
    """A tool. Functions are the only type that is served."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: Unused = NULL


class _ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class _AllowedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: _ChosenFunction


class _AllowedTools(msgspec.Struct, frozen=True):
    tools: tuple[_AllowedTool, ...]
    mode: Literal["auto", "required"] = "auto"


class ChosenTool(msgspec.Struct, frozen=True):
    """The one tool that must be called, or those that may or must be."""

    type: Literal["function", "allowed_tools"]
    function: _ChosenFunction | None = None
    allowed_tools: _AllowedTools | None = None


_tools_reader: Reader[list[ToolBody] | None] = Reader(list[ToolBody] | None)
_choice_reader: Reader[str | ChosenTool | None] = Reader(str | ChosenTool | None)


def stated_tools(stated: msgspec.Raw) -> tuple[Tool, ...]:
    """A body's ``tools``. Raises ``InvalidRequest``."""
    require_bounds(stated)
    tools: list[ToolBody] | None = decode_part(stated, _tools_reader, "tools")
    return tuple(
        read_tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            tool.function.strict,
            f"tools[{at}].function",
        )
        for at, tool in enumerate(tools or ())
    )


def tool_use_of(
    stated: msgspec.Raw, tool_choice: msgspec.Raw, *, is_parallel: bool
) -> ToolUse | None:
    """The tools that may be called; None if there are none. Raises ``InvalidRequest``."""
    require_bounds(tool_choice, "tool_choice")
    choice = decode_part(tool_choice, _choice_reader, "tool_choice")
    tools = stated_tools(stated)
    if not isinstance(choice, ChosenTool):
        return use_of(tools, choice, "", is_parallel=is_parallel)
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise _missing("allowed_tools")
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        some = allowed_of(tools, names, "tool_choice.allowed_tools.tools")
        return use_of(some, choice.allowed_tools.mode, "", is_parallel=is_parallel)
    if choice.function is None:
        raise _missing("function")
    return use_of(tools, None, choice.function.name, is_parallel=is_parallel)


def allowed_of(tools: tuple[Tool, ...], names: Set[str], field: str) -> tuple[Tool, ...]:
    """The tools that ``tool_choice`` allows. The model is shown no others, for it might call any
    that it knows. Raises ``InvalidRequest``."""
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequest(f"{field}: tools has no {excerpt(min(unknown), 64)!r}", field=field)
    return tuple(tool for tool in tools if tool.name in names)


def use_of(
    tools: tuple[Tool, ...], mode: str | None, only: str, *, is_parallel: bool
) -> ToolUse | None:
    """The tools as ``tool_choice`` has them used: a ``mode``, or the ``only`` one to be called.
    None if no tool may be called. Raises ``InvalidRequest``."""
    if mode not in (None, "auto", "none", "required"):
        raise InvalidRequest(
            "tool_choice must be auto, none, required, or name a function", field="tool_choice"
        )
    if not tools and (only or mode == "required"):
        raise InvalidRequest(
            "tool_choice asks for tool calls, and there are no tools", field="tool_choice"
        )
    if not tools or mode == "none":
        return None
    use = ToolUse(
        tools,
        must_call=mode == "required" or bool(only),
        only=only,
        only_one_call=bool(only) or not is_parallel,
    )
    require_known(use)
    return use


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice.{field} is required", field=f"tool_choice.{field}")
