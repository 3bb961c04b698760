"""Tools as bodies of ``/v1/responses`` state them, and which of them may or must be called."""

from typing import Literal

import msgspec

from orchestrator.api.http.decode import decode_part
from orchestrator.api.http.fields import NULL
from orchestrator.api.http.tools import read_tool, require_bounds
from orchestrator.api.openai.tools import use_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from worker.protocol import excerpt


class FunctionTool(msgspec.Struct, frozen=True):
    """A function of the client's; of other types, which are not served, only that is read."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None


class Choice(msgspec.Struct, frozen=True):
    """The one function that must be called, or those that may or must be."""

    type: str
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: tuple[FunctionTool, ...] = ()


_tools_decoder: msgspec.json.Decoder[list[FunctionTool] | None] = msgspec.json.Decoder(
    list[FunctionTool] | None
)
_choice_decoder: msgspec.json.Decoder[str | Choice | None] = msgspec.json.Decoder(
    str | Choice | None
)


def tool_use_of(
    tools: msgspec.Raw, tool_choice: msgspec.Raw, *, is_parallel: bool
) -> ToolUse | None:
    """None where no tool may be called. Raises ``InvalidRequest``."""
    require_bounds(tools)
    require_bounds(tool_choice, "tool_choice")
    stated: list[FunctionTool] | None = decode_part(tools, _tools_decoder, "tools")
    for at, tool in enumerate(stated or ()):
        _require_function(tool.type, f"tools[{at}].type")
    known = tuple(
        read_tool(tool.name, tool.description, tool.parameters, tool.strict, f"tools[{at}]")
        for at, tool in enumerate(stated or ())
    )
    choice: str | Choice | None = decode_part(tool_choice, _choice_decoder, "tool_choice")
    if not isinstance(choice, Choice):
        return use_of(known, choice, "", is_parallel=is_parallel)
    if choice.type != "allowed_tools":
        _require_function(choice.type, "tool_choice.type")
        return use_of(known, None, choice.name, is_parallel=is_parallel)
    allowed = {tool.name for tool in choice.tools}
    if unknown := allowed - {tool.name for tool in known}:
        raise InvalidRequest(
            f"tool_choice.tools: tools has no {excerpt(min(unknown), 64)!r}",
            field="tool_choice.tools",
        )
    some = tuple(tool for tool in known if tool.name in allowed)
    return use_of(some, choice.mode, "", is_parallel=is_parallel)


def _require_function(kind: str, field: str) -> None:
    if kind != "function":
        raise InvalidRequest(
            f"{field}: {excerpt(kind, 64)} is not served here, only function", field=field
        )
