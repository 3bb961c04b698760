"""A body's inputs for the chat template: tools, and vLLM's ``chat_template_kwargs``."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from aiohttp import web

from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import NULL
from orchestrator.api.http.ignored import pass_over, passed_over
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.parsing import ToolUse
from orchestrator.tasks.job import JsonObject, TemplateArgument, Tool, ToolCall

MAX_TOOLS = 512
MAX_TOOL_BYTES = 512 * 1024
"""Most bytes of all tools of a request. They are rendered into its prompt."""
MAX_DEPTH = 64
"""Deepest nesting of a schema or of arguments. Code that walks them recurses once per level."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)
UNREADABLE = "INVALID_JSON"
"""Name under which the model gets arguments that are not a JSON object. From Anthropic's
documentation (fine-grained tool streaming)."""
_string_reader = Reader(str)
_object_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def read_tool(
    name: str, description: str | None, schema: msgspec.Raw | None, strict: bool | None, where: str
) -> Tool:
    """Read the tool at ``where`` in a body. Raises ``InvalidRequest``."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name must be 1 to 128 letters, digits or any of _ . : -",
            field=f"{where}.name",
        )
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


def require_bounds(raw: msgspec.Raw, field: str = "tools") -> None:
    """Raise ``InvalidRequest`` for tools with too many bytes, before they are decoded."""
    if len(memoryview(raw)) > MAX_TOOL_BYTES:
        raise InvalidRequest(f"{field} must have at most {MAX_TOOL_BYTES} bytes", field=field)


def require_known(use: ToolUse) -> None:
    """Raise ``InvalidRequest`` if the chosen tool does not exist or there are too many tools."""
    if len(use.tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools: send at most {MAX_TOOLS}, got {len(use.tools)}", field="tools"
        )
    if use.only and all(tool.name != use.only for tool in use.tools):
        raise InvalidRequest("tool_choice: tools has no tool of that name", field="tool_choice")


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
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
        raise InvalidRequest(f"{field} must have at most {_MAX_ARGUMENT_BYTES} bytes", field=field)
    unfit = InvalidRequest(
        f"{field} must be an object of true, false, numbers or words of up to 64 characters, "
        'such as {"enable_thinking": false}',
        field=field,
    )
    try:
        arguments = _arguments_decoder.decode(stated) or {}
    except msgspec.DecodeError:
        raise unfit from None
    if any(isinstance(value, str) and not _WORD.fullmatch(value) for value in arguments.values()):
        raise unfit
    return arguments


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
    field = f"{place}.{name}".lstrip(".")
    pass_over(place, name, InvalidRequest(f"{field}: the model's template has none", field=field))
    return {}
