"""A body's inputs for the chat template: tools, and vLLM's ``chat_template_kwargs``."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.field_errors import must, wrong
from orchestrator.api.http.fields import NULL
from orchestrator.api.http.ignored import pass_over, passed_over
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.parsing.parser import ToolUse
from orchestrator.tasks.job import JsonObject, TemplateArgument, Tool, ToolCall

T = TypeVar("T")

MAX_TOOLS = 512
MAX_TOOL_BYTES = 512 * 1024
"""Most bytes of all tools of a request. They are rendered into its prompt."""
MAX_DEPTH = 64
"""Deepest nesting of a schema or of arguments. Code that walks them recurses once per level."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)
UNREADABLE = "INVALID_JSON"
"""Name under which the model gets arguments that are not a JSON object. From Anthropic's
documentation (fine-grained tool streaming)."""
_string_reader: Reader[str] = Reader(str)
_object_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def read_tool(
    name: str, description: str | None, schema: msgspec.Raw | None, strict: bool | None, where: str
) -> Tool:
    """Read the tool at ``where`` in a body. Raises ``InvalidRequest``."""
    if not _NAME.fullmatch(name):
        raise must(f"{where}.name", "be 1 to 128 letters, digits or any of _ . : -")
    raw = b"" if schema is None else bytes(schema)
    parameters = None
    if raw and raw != b"null":
        parameters = read_object(raw, f"{where}: its JSON Schema", where)
    chars = len(name) + len(description or "") + len(raw)
    return Tool(name, description or "", parameters, bool(strict), chars)


def read_call(call_id: str, name: str, arguments: str | msgspec.Raw, where: str) -> ToolCall:
    """Read a tool call of an earlier turn. Its arguments are an object, a string, or missing. Other
    arguments than JSON objects are passed to the model unchanged, unless requests are read
    strictly. Raises ``InvalidRequest``."""
    if isinstance(arguments, str):
        text = arguments
    elif bytes(memoryview(arguments)[:1]) == b'"':
        text = decode_part(arguments, _string_reader, where)
    else:
        text = bytes(memoryview(arguments)).decode()
    if text.strip() in ("", "null"):
        return ToolCall(call_id, name, {}, len(name))
    try:
        stated = read_object(text, where, where)
    except InvalidRequest:
        if passed_over() is None:
            raise
        stated = {UNREADABLE: text}
    return ToolCall(call_id, name, stated, len(name) + len(text))


def read_object(data: str | bytes, what: str, where: str) -> JsonObject:
    """Read a JSON object of at most ``MAX_DEPTH`` levels. ``InvalidRequest`` names ``what``."""
    try:
        value = _object_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise InvalidRequest(f"{what} must be a JSON object", field=where) from None
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise InvalidRequest(f"{what} must not be nested deeper than {MAX_DEPTH}", field=where)


def decode_tools(raw: msgspec.Raw, reader: Reader[T], field: str = "tools") -> T:
    """Read the field with tools or with their choice. Raises ``InvalidRequest``; for too many
    bytes, before they are decoded."""
    if len(memoryview(raw)) > MAX_TOOL_BYTES:
        raise must(field, f"have at most {MAX_TOOL_BYTES} bytes")
    return decode_part(raw, reader, field)


def use_of(tools: tuple[Tool, ...], *, must_call: bool, only: str, is_parallel: bool) -> ToolUse:
    """The use of tools; ``only`` is the one that must be called. Raises ``InvalidRequest`` if it
    does not exist or there are too many tools."""
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"send at most {MAX_TOOLS}, got {len(tools)}")
    if only and all(tool.name != only for tool in tools):
        raise wrong("tool_choice", "tools has no tool of that name")
    return ToolUse(tools, must_call, only, only_one_call=bool(only) or not is_parallel)


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


_MAX_ARGUMENT_BYTES = 4096
_arguments_decoder = msgspec.json.Decoder(dict[str, bool | int | float | str | None] | None)
_WORD = re.compile(r"[A-Za-z0-9 _.,:+-]{0,64}")
"""Strings that may be passed to a template. None of them can spell a special token."""


def template_arguments(stated: msgspec.Raw) -> Mapping[str, TemplateArgument]:
    if stated is NULL:
        return {}
    field = "chat_template_kwargs"
    if len(memoryview(stated)) > _MAX_ARGUMENT_BYTES:
        raise must(field, f"have at most {_MAX_ARGUMENT_BYTES} bytes")
    with suppress(msgspec.DecodeError):
        arguments = _arguments_decoder.decode(stated) or {}
        if all(_WORD.fullmatch(each) for each in arguments.values() if isinstance(each, str)):
            return arguments
    raise must(
        field,
        "be an object of true, false, numbers or words of up to 64 characters, such as "
        '{"enable_thinking": false}',
    )


EFFORT: Final = "reasoning_effort"


def effort_argument(
    request: web.Request, model: str, effort: str | None, place: str = "", name: str = EFFORT
) -> Mapping[str, TemplateArgument]:
    """The template argument for the reasoning effort of ``model``. The field ``name`` at ``place``
    is reported as ignored if the template does not read it. Models not loaded yet get it too."""
    if effort is None:
        return {}
    encoder = None
    with suppress(TidegateError):
        encoder = request.app[ORCHESTRATOR].models.resolve(model)
    if _WORD.fullmatch(effort) and (encoder is None or encoder.reads(EFFORT)):
        return {EFFORT: effort}
    pass_over(place, name, wrong(f"{place}.{name}".lstrip("."), "the model's template has none"))
    return {}
