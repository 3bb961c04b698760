"""The tools of ``/v1/responses``: functions, free-text tools, and namespaces of both.

Models know only functions, so every tool becomes a function. A call of it is converted back to the
client's tool::

    {"type": "namespace", "name": "mcp__git",      →  function mcp__git__log
     "tools": [{"type": "function", "name": "log"}]}   ←  name: log, namespace: mcp__git
    {"type": "custom", "name": "apply_patch"}      →  function apply_patch(input)
                                                   ←  custom_tool_call with the text as input
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from orchestrator.api.http.decode import Reader
from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.tools import decode_tools, read_tool
from orchestrator.api.openai.tools import (
    FreeTextFormat,
    ToolChoice,
    free_text_tool,
    is_called,
    tool_use_of,
)
from orchestrator.parsing.parser import ToolUse
from orchestrator.tasks.job import Tool
from protocol import excerpt


class CallableTool(msgspec.Struct, frozen=True):
    """A function or a free-text tool. Other fields of unsupported types are not read."""

    type: str
    name: str = ""
    namespace: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    format: FreeTextFormat | None = None
    output_schema: Unused = NULL
    defer_loading: Unused = NULL
    """Has no effect: the model sees every tool at once."""


class StatedTool(CallableTool, frozen=True):
    """A tool, or a namespace of tools."""

    tools: tuple[CallableTool, ...] = ()


class ForcedTool(ToolChoice, frozen=True):
    """The one tool that must be called."""

    name: str = ""
    namespace: str | None = None

    def chosen(self) -> str:
        return known_as(self.name, self.namespace)


class Origin(NamedTuple):
    """The client's name for a tool that has another name for the model."""

    name: str
    namespace: str | None
    is_custom: bool


class AskedTools(NamedTuple):
    """The tools that may be called; ``use`` is None if there are none."""

    use: ToolUse | None
    origins: Mapping[str, Origin]
    """Tools other than plain functions, by the model's names."""


_tools_reader: Reader[list[StatedTool] | None] = Reader(list[StatedTool] | None)
_choice_reader: Reader[str | ToolChoice | None] = Reader(str | ForcedTool | None)


def known_as(name: str, namespace: str | None) -> str:
    """The model's name for a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def asked_tools(tools: msgspec.Raw, tool_choice: msgspec.Raw, *, is_parallel: bool) -> AskedTools:
    """The tools of a request. Raises ``InvalidRequest``."""
    stated: list[StatedTool] | None = decode_tools(tools, _tools_reader)
    known: list[Tool] = []
    origins: dict[str, Origin] = {}
    names: dict[str, str | None] = {}
    for tool, where in _unfolded(stated or ()):
        name = known_as(tool.name, tool.namespace)
        if name in names and (names[name] or tool.namespace):
            quoted = excerpt(name, 128)
            raise wrong(where, f"the model would see two tools named {quoted}; rename one")
        names[name] = tool.namespace
        is_custom = tool.type == "custom"
        if is_custom:
            known.append(free_text_tool(name, tool.description, tool.format, where))
        else:
            known.append(read_tool(name, tool.description, tool.parameters, tool.strict, where))
        if is_custom or tool.namespace:
            origins[name] = Origin(tool.name, tool.namespace, is_custom)
    use = tool_use_of(
        tuple(known), tool_choice, is_parallel=is_parallel, choice_reader=_choice_reader
    )
    return AskedTools(use, origins)


def _unfolded(stated: Sequence[StatedTool]) -> Iterator[tuple[CallableTool, str]]:
    """Every tool that can be called, with its path in the body."""
    for at, tool in enumerate(stated):
        where = f"tools[{at}]"
        if tool.type != "namespace":
            if is_called(tool.type, f"{where}.type"):
                yield tool, where
            continue
        for n, inner in enumerate(tool.tools):
            if is_called(inner.type, f"{where}.tools[{n}].type"):
                yield msgspec.structs.replace(inner, namespace=tool.name), f"{where}.tools[{n}]"
