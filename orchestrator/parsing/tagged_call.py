"""A call with each argument in tags instead of a JSON object::

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A ``TagSyntax`` defines the tags. If the tool's schema allows only text, a value is text and is
emitted as it arrives. Other values are JSON and are emitted when they are complete. A value that is
neither is emitted as text.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from orchestrator.parsing.json_call import WHITESPACE, MarkedCall, Reading
from orchestrator.parsing.markers import begun
from orchestrator.tasks.job import JsonObject
from protocol.closed_schema import resolved

_decode = msgspec.json.Decoder().decode
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES = 8
"""Most references followed between schemas to find one with a type."""


class TagSyntax(NamedTuple):
    """The tags of a model family's calls. There may be white space before each tag."""

    name: tuple[str, str]
    """Tags around the tool's name."""
    key: tuple[str, str]
    """Tags around an argument's name."""
    value: tuple[str, str]
    """Tags around an argument's value. The first is empty if the value directly follows the key."""
    end: str
    on_lines: bool
    """Whether a value has its own lines: line breaks at its start and end are not part of it."""


QWEN3_CODER = TagSyntax(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", True
)
GLM45 = TagSyntax(
    ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>", False
)


class TaggedCall(MarkedCall):
    """Reads one call. Arguments of an unknown tool are text."""

    def __init__(self, syntax: TagSyntax, tools: Mapping[str, JsonObject | None]) -> None:
        super().__init__()
        self._syntax = syntax
        self._tools = tools

    def _whole(self) -> Reading[None]:
        syntax = self._syntax
        before, behind = syntax.name
        if before:
            yield from self._tag(before)
        else:
            yield from self._behind_space()
        self.name = yield from self._name_up_to(behind[0] if behind else "\n<")
        if behind:
            yield from self._tag(behind)
        separator = "{"
        while (yield from self._tag(syntax.key[0], syntax.end)) != syntax.end:
            key = yield from self._word_up_to(syntax.key[1][0])
            yield from self._tag(syntax.key[1])
            if syntax.value[0]:
                yield from self._tag(syntax.value[0])
            self._untold += f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            separator = ", "
            yield from self._argument(key)
        self._untold += "{}" if separator == "{" else "}"

    def _argument(self, key: str) -> Reading[None]:
        schema, on_lines = self._tools.get(self.name), self._syntax.on_lines
        types, close = types_of(schema, key), self._syntax.value[1]
        is_text = types <= {"string"}
        if is_text:
            self._untold += '"'
        value, is_told = "", False
        while True:
            yield from self._char()
            value += self._text[self._at :]
            self._at = len(self._text)
            if (end := value.find(close)) >= 0:
                break
            certain = len(value) - begun(value, close)
            if on_lines and value[:certain].endswith("\n"):
                certain -= 1
            # A line break at its start may be the only text between two tags.
            least = 0 if is_told or not value.startswith("\n") else 1
            if is_text and certain > least:
                self._tell(value[:certain], is_start=on_lines and not is_told)
                value, is_told = value[certain:], True
        self._at -= len(value) - end - len(close)
        value = value[:end]
        if on_lines:
            value = value.removesuffix("\n")
        if is_text:
            self._tell(value, is_start=on_lines and not is_told)
            self._untold += '"'
        else:
            value = value.removeprefix("\n") if on_lines else value
            self._untold += as_json(value, types)

    def _tell(self, text: str, *, is_start: bool) -> None:
        text = text.removeprefix("\n") if is_start else text
        self._untold += json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: JsonObject | None, key: str) -> set[str]:
    """JSON types that a schema allows for the argument ``key``; empty if it has no types."""
    properties = (schema or {}).get("properties")
    stated = properties.get(key) if isinstance(properties, Mapping) else None
    return _types_in(stated, schema or {}, _MAX_REFERENCES)


def _types_in(stated: object, root: JsonObject, left: int) -> set[str]:
    if not isinstance(stated, Mapping) or not left:
        return set()
    types: set[str] = set()
    match stated.get("type"):
        case str() as one:
            types = {one}
        case list() as several:
            types = {one for one in several if isinstance(one, str)}
    if types:
        return types
    if "const" in stated:
        types = {_type_of(stated["const"])}
    elif isinstance(values := stated.get("enum"), list):
        types = {_type_of(value) for value in values}
    elif reference := stated.get("$ref"):
        types = _types_in(resolved(root, reference), root, left - 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := stated.get(keyword), list):
            types = types.union(*(_types_in(branch, root, left - 1) for branch in branches))
    return types


def _type_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
    return "object"


def as_json(written: str, types: set[str]) -> str:
    """A value as JSON of one of ``types``; if it is none of them, a JSON string."""
    stripped = written.strip(WHITESPACE)
    stripped = _PYTHON.get(stripped, stripped)
    try:
        kind = _type_of(_decode(stripped))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        kind = ""
    kinds = {"number", "integer"} if kind == "number" else {kind}
    if kind and ("string" not in types or kinds & types):
        return stripped
    return json.dumps(written, ensure_ascii=False)
