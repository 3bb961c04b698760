"""Tools as OpenAI's chat bodies state them, and which of them may or must be called."""

from typing import Literal, Protocol

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.tools import read_tool, require_bounds, require_known
from orchestrator.errors import InvalidRequest
from orchestrator.parsing.tool_use import ToolUse
from orchestrator.tasks.tools import Tool


class FunctionBody(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True):
    """The only kind of tool that is served."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: Unused = NULL


class _ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: _ChosenFunction


class StatesTools(Protocol):
    """The fields of a body that are read here."""

    @property
    def tools(self) -> msgspec.Raw: ...
    @property
    def tool_choice(self) -> msgspec.Raw: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...


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


def tool_use_of(body: StatesTools) -> ToolUse | None:
    """None where no tool may be called. Raises ``InvalidRequest``."""
    require_bounds(body.tool_choice, "tool_choice")
    choice = decode_part(body.tool_choice, _choice_reader, "tool_choice")
    tools = stated_tools(body.tools)
    only = choice.function.name if isinstance(choice, ChosenTool) else ""
    mode = choice if isinstance(choice, str) else None
    return use_of(tools, mode, only, is_parallel=body.parallel_tool_calls is not False)


def use_of(
    tools: tuple[Tool, ...], mode: str | None, only: str, *, is_parallel: bool
) -> ToolUse | None:
    """What ``tool_choice`` makes of the tools: a ``mode``, or the ``only`` one to be called.

    None where none may be called. Raises ``InvalidRequest``.
    """
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
