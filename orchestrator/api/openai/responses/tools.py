"""Tools in bodies of ``/v1/responses``, and which of them may or must be called."""

from typing import Literal

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.tools import read_tool, require_bounds
from orchestrator.api.openai.tools import allowed_of, use_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from protocol import excerpt


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool. Only functions of the client are served; of other types nothing but the type is
    read."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    output_schema: Unused = NULL


class ForcedTools(msgspec.Struct, frozen=True):
    """The one function that must be called, or those that may or must be."""

    type: str
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: tuple[FunctionTool, ...] = ()


_tools_reader: Reader[list[FunctionTool] | None] = Reader(list[FunctionTool] | None)
_choice_reader: Reader[str | ForcedTools | None] = Reader(str | ForcedTools | None)


def tool_use_of(
    tools: msgspec.Raw, tool_choice: msgspec.Raw, *, is_parallel: bool
) -> ToolUse | None:
    """The tools that may be called; None if there are none. Raises ``InvalidRequest``."""
    require_bounds(tools)
    require_bounds(tool_choice, "tool_choice")
    stated: list[FunctionTool] | None = decode_part(tools, _tools_reader, "tools")
    known = tuple(
        read_tool(tool.name, tool.description, tool.parameters, tool.strict, f"tools[{at}]")
        for at, tool in enumerate(stated or ())
        if _is_served(tool.type, f"tools[{at}].type")
    )
    choice: str | ForcedTools | None = decode_part(tool_choice, _choice_reader, "tool_choice")
    if not isinstance(choice, ForcedTools):
        return use_of(known, choice, "", is_parallel=is_parallel)
    if choice.type != "allowed_tools":
        if choice.type != "function":
            raise _unserved(choice.type, "tool_choice.type")
        return use_of(known, None, choice.name, is_parallel=is_parallel)
    allowed = {
        tool.name for tool in choice.tools if _is_served(tool.type, "tool_choice.tools[].type")
    }
    some = allowed_of(known, allowed, "tool_choice.tools")
    return use_of(some, choice.mode, "", is_parallel=is_parallel)


def _is_served(kind: str, field: str) -> bool:
    """Whether a tool can be called: only the client's functions can. The model is not told of
    others, so that it answers without them."""
    if kind == "function":
        return True
    pass_over("tools[]", f"type={excerpt(kind, 64)}", _unserved(kind, field))
    return False


def _unserved(kind: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {excerpt(kind, 64)} is not served here, only function", field=field
    )
