"""Objects have the properties that their schemas name, and no others."""

import json
from typing import Any

import pytest

from protocol import Grammar, GrammarKind
from protocol.closed_schema import closed
from protocol.grammar_source import check_source, source_of
from tests.support.cases import for_each

A: Any = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
B: Any = {"properties": {"b": {"properties": {"x": {"type": "integer"}}}}}
C: Any = {"properties": {"c": {"type": "string"}}}
CLOSED = {"additionalProperties": False}
NEXT: Any = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}


@for_each(
    ("schema", "expected"),
    [
        (A, A | CLOSED),
        (True, True),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}} | CLOSED),
        (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
        (A | {"unevaluatedProperties": False}, A | CLOSED),
        ({"items": A}, {"items": A | CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | CLOSED, {"type": "null"}]}),
        (NEXT, NEXT | CLOSED),
        (
            {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}},
            {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A | CLOSED}},
        ),
        ({"enum": [A], "default": A}, {"enum": [A], "default": A}),
        ({"not": A}, {"not": A}),
        # Each part alone would leave no room for what the others name.
        *(
            (open, open)
            for open in ({"allOf": [A, B]}, A | {"anyOf": [B]}, {"items": [A | {"if": B}]})
        ),
        (A | {"patternProperties": {"^x": {}}}, A | {"patternProperties": {"^x": {}}}),
        ({"properties": [], "required": ["a"]}, {"properties": [], "required": ["a"]} | CLOSED),
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


def test_json_is_compact_and_closed_in_every_kind_of_grammar() -> None:
    llguidance = pytest.importorskip("llguidance", reason="the engine of grammars")
    from tests.support.fake_worker import tokenizer_json

    tokenizer = llguidance.LLTokenizer(tokenizer_json().decode())
    structures = [{"begin": "<a>", "schema": A, "end": "</a>"}]
    tag = json.dumps({"structures": structures, "triggers": ["<a>"]})
    for kind, text, around in (
        (GrammarKind.JSON_SCHEMA, json.dumps(A), "{}"),
        (GrammarKind.STRUCTURAL_TAG, tag, "<a>{}</a>"),
    ):
        source = source_of(Grammar(kind, text))
        for body, fits in (
            ('{"a":"1"}', True),
            ('{ "a": "1" }', False),
            ('{"a":"1","b":2}', False),
        ):
            matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
            ids = tokenizer.tokenize_str(around.replace("{}", body))
            assert bool(matcher.consume_tokens(ids)) is fits, (kind, body)


@for_each(
    ("schema", "names"),
    [
        (A, []),
        ({"type": "array", "uniqueItems": True, "contains": {}}, ["contains", "uniqueItems"]),
        ({"type": "string", "format": "zip"}, ["format=zip"]),
        ({"type": "string", "pattern": r"^(?!\.)a"}, ["pattern"]),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ["oneOf"]),
        ({"properties": {"pattern": {"not": {}}}, "if": {}}, ["if", "not"]),
    ],
)
def test_what_is_passed_over_is_named(schema: Any, names: list[str]) -> None:
    pytest.importorskip("llguidance", reason="the engine of grammars")
    found = check_source(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), lenient=True))
    assert sorted(found) == sorted(names)
