"""Objects have the properties that their schemas name, and no others."""

import json
from typing import Any

import pytest

from protocol import Grammar, GrammarKind
from protocol.closed_schema import closed, texts_of
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
        # A property of which two schemas that both hold say something stays open.
        (
            {"allOf": [{"properties": {"p": A}}], "properties": {"p": C}},
            {"allOf": [{"properties": {"p": A}}], "properties": {"p": C}} | CLOSED,
        ),
        ({"properties": [], "required": ["a"]}, {"properties": [], "required": ["a"]} | CLOSED),
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


WHOLE = '{"a":"1","b":{"x":2}}'


@for_each(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
        {"properties": {"a": {}, **B["properties"]}, "anyOf": [A, {"required": ["c"]}]},
        {"allOf": [{"anyOf": [{"$ref": "#/$defs/A"}]}, B], "$defs": {"A": A}},
    ],
)
def test_what_several_schemas_say_is_closed_as_a_whole(schema: Any) -> None:
    """Each of them alone would leave no room for what the others name."""
    llguidance = pytest.importorskip("llguidance", reason="the engine of grammars")
    from tests.support.fake_worker import tokenizer_json

    tokenizer = llguidance.LLTokenizer(tokenizer_json().decode())
    source = source_of(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))

    def takes(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
        assert not matcher.get_error()
        return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())

    assert takes(WHOLE)
    for more in (WHOLE[:-1] + ',"d":1}', WHOLE[:-2] + ',"y":1}}', WHOLE.replace(":", ": ")):
        assert not takes(more)


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


@for_each(
    ("pattern", "texts"),
    [
        ("^a$", ["a"]),
        ("^(a|bc)_[01]$", ["a_0", "a_1", "bc_0", "bc_1"]),
        ("^a$|^b$", ["a", "b"]),
        (r"^x?\.$", [".", "x."]),
        ("^$", [""]),
        (r"\Aa\z", ["a"]),
        ("(?i)^a1$", ["a1", "A1"]),
        ("^(?i:a)b$", ["ab", "Ab"]),
        ("(?s)^a$", ["a"]),
        ("^(?<n>a|b)$", ["a", "b"]),
        (r"^[^\s\S]$", []),
        *((pattern, None) for pattern in ("a", "^a", "^a$|b", "^a*$", "^[a-z]{2}$", "^[^a]$")),
        *(
            (pattern, None)
            for pattern in (r"^a\\z", "(?i)^.$", "^(?!a)b$", "^a$b", "(", r"^\w$", "^a{99999}$")
        ),
    ],
)
def test_patterns_of_few_texts(pattern: str, texts: list[str] | None) -> None:
    assert texts_of(pattern) == texts


def test_a_pattern_of_few_names_is_these_names() -> None:
    schema = {
        "properties": {"a": {"type": "string"}},
        "patternProperties": {"^[ab]$": {"minLength": 1}, "^x": True},
    }
    assert closed(schema) == {
        "properties": {
            "a": {"allOf": [{"type": "string"}, {"minLength": 1}]},
            "b": {"minLength": 1},
        },
        "patternProperties": {"^x": True},
        "additionalProperties": False,
    }
    hours = [f"{hour:03}" for hour in range(100)]
    many = {"properties": dict.fromkeys(hours, True), "patternProperties": {r"^0\d\d$": C}}
    assert closed(many) == {"properties": dict.fromkeys(hours, C | CLOSED)} | CLOSED
    del many["properties"]["042"]
    assert closed(many)["patternProperties"].keys() == {r"^0\d\d$"}
    inside = closed({"items": {"patternProperties": {"^a$": {}}, "required": ["a"]}})
    assert inside["items"]["properties"] == {"a": {}} and "patternProperties" not in inside["items"]
