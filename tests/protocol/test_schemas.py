"""Grammars of JSON schemas: compact, as open as their schema, with a list of what they ignore."""

import json
from itertools import product
from typing import Any

import pytest

from protocol import Grammar, GrammarKind
from protocol.grammar_source import check_source, source_of
from tests.support.cases import for_each

A: Any = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CLOSED: Any = A | {"additionalProperties": False}


def test_json_is_compact_and_as_open_as_its_schema_in_every_kind_of_grammar() -> None:
    llguidance = pytest.importorskip("llguidance", reason="the engine of grammars")
    from tests.support.fake_worker import tokenizer_json

    tokenizer = llguidance.LLTokenizer(tokenizer_json().decode())
    for schema, kind in product((A, CLOSED), (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)):
        structures = [{"begin": "<a>", "schema": schema, "end": "</a>"}]
        tag = {"structures": structures, "triggers": ["<a>"]}
        is_tag = kind is GrammarKind.STRUCTURAL_TAG
        source = source_of(Grammar(kind, json.dumps(tag if is_tag else schema)))
        around = "<a>{}</a>" if is_tag else "{}"
        for body, fits in (
            ('{"a":"1"}', True),
            ('{ "a": "1" }', False),
            ('{"a":"1","b":2}', schema is A),
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
