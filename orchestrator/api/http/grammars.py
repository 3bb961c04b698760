"""Fields for the format of the answer: OpenAI's ``response_format``, and vLLM's
``structured_outputs`` with its older names, ``guided_…``.

A schema's text goes to the worker unchanged: it may be long, and only the worker reads it.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.fields import NULL, GenerationRequest, StatedGrammar, Unused
from orchestrator.errors import InvalidRequest
from protocol import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, InvalidGrammar

T = TypeVar("T")

_ROOM_BYTES = 4096
"""Most bytes around a schema in its field."""


class GrammarRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    response_format: msgspec.Raw = NULL
    structured_outputs: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL
    guided_regex: str | None = None
    guided_choice: msgspec.Raw = NULL
    guided_grammar: str | None = None
    guided_decoding_backend: Unused = NULL

    def stated_grammar(self) -> StatedGrammar | None:
        stated = _stated_in(self, _FIELDS)
        if len(stated) > 1:
            raise InvalidRequest(
                f"{stated[0].field} and {stated[1].field} both set the answer's format; "
                "send one of them",
                field=stated[1].field,
            )
        return stated[0] if stated else None


class _JsonSchema(msgspec.Struct):
    name: Unused = NULL
    description: Unused = NULL
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None
    schema: msgspec.Raw = NULL
    """The schema of ``json_object`` in llama.cpp's format."""
    format: Unused = NULL
    structures: Unused = NULL
    triggers: Unused = NULL
    """Field of a structural tag. The tag is read as a whole."""


class _StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: msgspec.Raw = NULL
    regex: str | None = None
    choice: msgspec.Raw = NULL
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NULL
    disable_fallback: Unused = NULL
    disable_any_whitespace: Unused = NULL
    disable_additional_properties: Unused = NULL
    whitespace_pattern: None = None


_format_reader: Reader[_ResponseFormat] = Reader(_ResponseFormat)
_outputs_reader: Reader[_StructuredOutputs] = Reader(_StructuredOutputs)
_strings: Reader[str] = Reader(str)


def _response_format(field: str, value: msgspec.Raw) -> Grammar | None:
    stated = _decode(field, value, _format_reader)
    if stated.type == "text":
        return None
    if stated.type == "json_schema":
        if stated.json_schema is None or stated.json_schema.schema == NULL:
            raise wrong(field, "json_schema needs json_schema.schema")
        return _json_schema(field, stated.json_schema.schema, stated.json_schema.strict)
    if stated.type == "json_object":
        if stated.schema != NULL:
            return _json_schema(field, stated.schema)
        return Grammar(GrammarKind.JSON_OBJECT)
    if stated.type == "structural_tag":
        return _checked(field, GrammarKind.STRUCTURAL_TAG, _text(value))
    raise _unknown_type(field, stated.type, "text, json_object, json_schema or structural_tag")


def stated_schema(
    field: str, kind: str, schema: msgspec.Raw, strict: bool | None, expected: str
) -> StatedGrammar:
    """The grammar of a format of type ``kind`` that must be a JSON Schema. ``expected`` are the
    supported types. Raises ``InvalidRequest``."""
    if kind != "json_schema":
        raise _unknown_type(field, kind, expected)
    if schema == NULL:
        raise wrong(field, "json_schema needs schema")
    return StatedGrammar(field, _json_schema(field, schema, strict))


def _unknown_type(field: str, kind: str, expected: str) -> InvalidRequest:
    return wrong(field, f"type {kind[:32]!r} is not supported; expected {expected}")


def _json_schema(field: str, schema: msgspec.Raw, strict: bool | None = None) -> Grammar:
    """The grammar of a schema, or of a string with a schema. Parts that cannot be enforced are
    ignored unless ``strict``."""
    text = _unquoted(field, schema)
    return _checked(field, GrammarKind.JSON_SCHEMA, text, lenient=not strict)


def _structured_outputs(field: str, value: msgspec.Raw) -> Grammar | None:
    value = msgspec.Raw(_unquoted(field, value).encode())
    found = _stated_in(_decode(field, value, _outputs_reader), _KINDS, field)
    if len(found) != 1:
        kinds = "json, regex, choice, grammar, json_object and structural_tag"
        raise wrong(field, f"expected exactly one of {kinds}")
    return found[0].grammar


def _checked(field: str, kind: GrammarKind, text: str, *, lenient: bool = False) -> Grammar:
    grammar = Grammar(kind, text, lenient)
    try:
        grammar.check()
    except InvalidGrammar as error:
        raise wrong(field, str(error)) from None
    return grammar


def _decode(field: str, value: msgspec.Raw, reader: Reader[T]) -> T:
    if len(memoryview(value)) > MAX_GRAMMAR_BYTES + _ROOM_BYTES:
        raise wrong(field, f"a grammar must have at most {MAX_GRAMMAR_BYTES} bytes")
    return decode_part(value, reader, field)


def _text(value: msgspec.Raw) -> str:
    return bytes(memoryview(value)).decode().strip()


def _unquoted(field: str, value: msgspec.Raw) -> str:
    """The JSON text of a value; of a string, its content."""
    text = _text(value)
    return str(_decode(field, value, _strings)) if text.startswith('"') else text


_Read = Callable[[str, Any], Grammar | None]
"""Reads the value of a field. Raises ``InvalidRequest``."""

_KINDS: dict[str, _Read] = {
    "json": _json_schema,
    "regex": lambda field, value: _checked(field, GrammarKind.REGEX, value),
    "choice": lambda field, value: _checked(field, GrammarKind.CHOICE, _text(value)),
    "grammar": lambda field, value: _checked(field, GrammarKind.LARK, value),
    "json_object": lambda field, value: Grammar(GrammarKind.JSON_OBJECT) if value else None,
    "structural_tag": lambda field, value: _checked(
        field, GrammarKind.STRUCTURAL_TAG, _unquoted(field, value)
    ),
}
"""Fields of ``structured_outputs``."""
_FIELDS: dict[str, _Read] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{kind}": _KINDS[kind] for kind in ("json", "choice", "regex", "grammar")},
}


def _stated_in(
    body: msgspec.Struct, readers: Mapping[str, _Read], field: str = ""
) -> list[StatedGrammar]:
    """The grammars in the fields of ``body``, which is the ``field`` of a request if stated."""
    return [
        StatedGrammar(name, grammar)
        for name, read in readers.items()
        if (value := getattr(body, name, None)) is not None
        and value != NULL
        and (grammar := read(field or name, value)) is not None
    ]
