"""Values that stand in tags become JSON of the type that their schema says."""

from typing import Any

from orchestrator.parsing.tagged_call import as_json, types_of
from tests.support.cases import for_each

ROOT: Any = {
    "$defs": {"Word": {"enum": ["a", "b"]}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "several": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"$ref": "#/$defs/Word"}, {"type": "null"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "wrong": 5,
    },
}


@for_each(
    ("key", "types"),
    [
        ("several", {"integer", "null"}),
        ("either", {"string", "null"}),
        ("loop", set()),
        ("wrong", set()),
    ],
)
def test_types(key: str, types: set[str]) -> None:
    assert types_of(ROOT, key) == types
    assert types_of(None, key) == types_of({"properties": []}, key) == set()


@for_each(
    ("written", "types", "expected"),
    [
        (" 5 ", {"integer"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("null", {"string", "null"}, "null"),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[" * 5000, {"array"}, f'"{"[" * 5000}"'),
        ("NaN", {"number"}, '"NaN"'),
    ],
)
def test_values(written: str, types: set[str], expected: str) -> None:
    assert as_json(written, types) == expected
