"""Tools as Anthropic's bodies state them, which may or must be called, and how much to think."""

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from orchestrator.api.http.decode import decode_part
from orchestrator.api.http.fields import NULL
from orchestrator.api.http.tools import read_tool, require_bounds, require_known
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from orchestrator.tasks.job import TemplateArgument


class ToolBody(msgspec.Struct, frozen=True):
    """The only kind of tool that is served: the client's own."""

    name: str
    input_schema: msgspec.Raw = NULL
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ChoiceBody(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True):
    """A budget of its own is not kept: ``max_tokens`` holds for all."""

    type: Literal["enabled", "disabled", "adaptive"]


class StatesTools(Protocol):
    """The fields of a body that are read here."""

    @property
    def tools(self) -> msgspec.Raw: ...
    @property
    def tool_choice(self) -> msgspec.Raw: ...
    @property
    def thinking(self) -> msgspec.Raw: ...


_tools_decoder: msgspec.json.Decoder[list[ToolBody] | None] = msgspec.json.Decoder(
    list[ToolBody] | None
)
_choice_decoder: msgspec.json.Decoder[ChoiceBody | None] = msgspec.json.Decoder(ChoiceBody | None)
_thinking_decoder: msgspec.json.Decoder[ThinkingBody | None] = msgspec.json.Decoder(
    ThinkingBody | None
)


def tool_use_of(body: StatesTools) -> ToolUse | None:
    """None where no tool may be called. Raises ``InvalidRequest``."""
    require_bounds(body.tools)
    require_bounds(body.tool_choice, "tool_choice")
    choice: ChoiceBody | None = decode_part(body.tool_choice, _choice_decoder, "tool_choice")
    stated: list[ToolBody] | None = decode_part(body.tools, _tools_decoder, "tools")
    tools = tuple(
        read_tool(tool.name, tool.description, tool.input_schema, tool.strict, f"tools[{at}]")
        for at, tool in enumerate(stated or ())
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


def thinking_of(body: StatesTools) -> Mapping[str, TemplateArgument]:
    """What a template that can do both is told; nothing where the client leaves it to the model.
    Raises ``InvalidRequest``."""
    require_bounds(body.thinking, "thinking")
    stated: ThinkingBody | None = decode_part(body.thinking, _thinking_decoder, "thinking")
    return {} if stated is None else {"enable_thinking": stated.type != "disabled"}
