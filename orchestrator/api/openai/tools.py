"""Tools in OpenAI's chat bodies, and the choice of tools that may or must be called."""

from typing import Final

import msgspec

from orchestrator.api.http.decode import Reader
from orchestrator.api.http.field_errors import missing, must, wrong
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.tools import decode_tools, read_tool, use_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing.parser import ToolUse
from orchestrator.tasks.job import Tool
from protocol import excerpt

CALLED: Final = ("function", "custom")
"""Types of tools that can be called."""
INPUT: Final = "input"
"""The model's name for the only argument of a free-text tool."""
_TEXT: Final = msgspec.Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],'
    b'"additionalProperties":false}'
)


class TextGrammar(msgspec.Struct, frozen=True):
    syntax: str = ""
    definition: str = ""


class FreeTextFormat(TextGrammar, frozen=True):
    """The format of a tool's free text. Chats have the grammar in a separate field."""

    type: str = "text"
    grammar: TextGrammar | None = None


class _FreeText(msgspec.Struct, gc=False):
    input: str


_text_decoder = msgspec.json.Decoder(_FreeText)


def free_text_tool(
    name: str, description: str | None, format: FreeTextFormat | None, where: str
) -> Tool:
    """A free-text tool as a function, because models know only functions. Its description states
    the format of the text; nothing enforces it. Raises ``InvalidRequest``."""
    text, stated = description or "", format and (format.grammar or format)
    if stated and stated.definition:
        syntax = excerpt(stated.syntax, 32)
        text += f"\n\nThe input is text by this {syntax} grammar:\n{stated.definition}"
    tool = read_tool(name, text, _TEXT, None, where)
    return msgspec.structs.replace(tool, is_free_text=True)


def free_text(arguments: str) -> str:
    """The text of a call of such a function; if invalid, the arguments unchanged for the client."""
    try:
        return _text_decoder.decode(arguments).input
    except msgspec.DecodeError:
        return arguments


class FunctionBody(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None


class CustomBody(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    format: FreeTextFormat | None = None


class ToolBody(msgspec.Struct, frozen=True):
    """A function or a free-text tool. Other fields of unsupported types are not read."""

    type: str = "function"
    function: FunctionBody | None = None
    custom: CustomBody | None = None
    cache_control: Unused = NULL


class _Named(msgspec.Struct, frozen=True):
    name: str


class ToolChoice(msgspec.Struct, frozen=True):
    """The one tool that must be called."""

    type: str

    def chosen(self) -> str:
        """The model's name for the tool. Raises ``InvalidRequest``."""
        raise NotImplementedError


class ChosenTool(ToolChoice, frozen=True):
    """The one tool that must be called."""

    function: _Named | None = None
    custom: _Named | None = None

    def chosen(self) -> str:
        named = self.custom if self.type == "custom" else self.function
        if named is None:
            raise missing(f"tool_choice.{self.type}")
        return named.name


_tools_reader: Reader[list[ToolBody] | None] = Reader(list[ToolBody] | None)
_choice_reader: Reader[str | ToolChoice | None] = Reader(str | ChosenTool | None)


def stated_tools(stated: msgspec.Raw) -> tuple[Tool, ...]:
    """A body's ``tools``. Raises ``InvalidRequest``."""
    tools: list[ToolBody] | None = decode_tools(stated, _tools_reader)
    return tuple(
        _tool_of(tool, f"tools[{at}]")
        for at, tool in enumerate(tools or ())
        if is_called(tool.type, f"tools[{at}].type")
    )


def is_called(kind: str, field: str) -> bool:
    """Whether tools of that type can be called. Other tools are hidden from the model, so that it
    answers without them. Raises ``InvalidRequest`` if requests are read strictly."""
    if kind in CALLED:
        return True
    kind = excerpt(kind, 64)
    refusal = wrong(field, f"{kind} is not supported; expected {' or '.join(CALLED)}")
    pass_over("tools[]", f"type={kind}", refusal)
    return False


def _tool_of(tool: ToolBody, where: str) -> Tool:
    if tool.type == "function" and (own := tool.function):
        where = f"{where}.function"
        return read_tool(own.name, own.description, own.parameters, own.strict, where)
    if tool.type == "custom" and (text := tool.custom):
        return free_text_tool(text.name, text.description, text.format, f"{where}.custom")
    raise missing(f"{where}.{tool.type}")


def tool_use_of(
    tools: tuple[Tool, ...],
    tool_choice: msgspec.Raw,
    *,
    is_parallel: bool,
    choice_reader: Reader[str | ToolChoice | None] = _choice_reader,
) -> ToolUse | None:
    """The use of ``tools`` by ``tool_choice``: a mode, or the only tool that must be called. None
    if no tool may be called. Raises ``InvalidRequest``."""
    choice: str | ToolChoice | None = decode_tools(tool_choice, choice_reader, "tool_choice")
    only = ""
    if choice is not None and not isinstance(choice, str):
        if choice.type not in CALLED:
            raise wrong(
                "tool_choice.type",
                f"{excerpt(choice.type, 64)} is not supported; expected function or custom; to "
                "allow several tools, send only those",
            )
        choice = "required" if (only := choice.chosen()) else None
    if choice not in (None, "auto", "none", "required"):
        raise must("tool_choice", "be auto, none, required, or name a function")
    must_call = choice == "required"
    if must_call and not tools:
        raise InvalidRequest(
            "tool_choice asks for tool calls, but the request has no tools", field="tool_choice"
        )
    if not tools or choice == "none":
        return None
    return use_of(tools, must_call=must_call, only=only, is_parallel=is_parallel)
