"""Formats of strings let nothing through that is none."""

import datetime
import json
import re

import pytest

from orchestrator.parsing.rules import Rules
from orchestrator.tasks.job import Tool
from protocol import Grammar, GrammarKind
from protocol.grammar_source import parser_limits, source_of
from protocol.string_forms import PATTERNS, with_forms
from tests.support.cases import for_each


def matches(form: str, text: str) -> bool:
    return re.search(PATTERNS[form], text) is not None


def test_dates_are_those_of_the_calendar() -> None:
    years = [0, 1, 4, 100, 400, 999, 1900, 2000, 2023, 2024, 2100, 9996, 9999]
    for year in years:
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                    is_one = True
                except ValueError:
                    is_one = False
                assert matches("date", text) == is_one, text


def test_every_leap_year_has_its_day_and_no_other() -> None:
    for year in range(1, 10_000):
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        assert matches("date", f"{year:04}-02-29") == is_leap, year


@for_each(
    ("form", "good", "bad"),
    [
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "2023-01-01T00:00:00.123+05:30"],
            [
                "2023-02-29T00:00:00Z",
                "2023-01-01T24:00:00Z",
                "1998-12-31T23:58:60Z",
                "2023-01-01T00:00:00",
                "2023-01-01T00:00:00+24:00",
                "2023-01-01 00:00:00Z",
            ],
        ),
        ("time", ["12:00:00Z", "23:59:59.5-23:59"], ["12:00:60Z", "24:00:00Z", "12:00Z", "12:00"]),
        (
            "hostname",
            [
                *("a", "a.b", "A-b.c9", "1.2", "a" * 61, "aa-a", "a-a", "a-b-c.d--e"[:7]),
                ".".join(["a" * 61, *["b" * 63] * 3]),
            ],
            [
                *("", "-a", "a-", "a..b", ".a", "a.", "a_b", "a-.b", "a.-b", "a" * 64),
                *("ab--cd", "xn--a", "XN--aa---o47jg78q", "a.bc--d", "é.com"),
                ".".join(["a" * 63] * 4),
            ],
        ),
        (
            "email",
            ["a@b", "a.b-c+d@e.org", "first.mid.von.last@a.b", "a" * 64 + "@b", "o'x{}@1.2"],
            [
                *("a" * 65 + "@b", "a@", "@b", "a@@b", ".a@b", "a.@b", "a..b@c", "a b@c"),
                *("a@b-", "a@ab--cd", "a@" + "b" * 64, "a" * 32 + "." + "b" * 32 + "@c", "é@b"),
            ],
        ),
    ],
)
def test_forms(form: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not matches(form, text)] == []
    assert [text for text in bad if matches(form, text)] == []


def test_grammars_hold_them() -> None:
    library = pytest.importorskip("llguidance")
    tokenizer = library.LLTokenizer("byte")
    cases = (("date", "2024-02-29", True), ("date", "2023-02-29", False), ("email", "a.b@c", True))
    for lenient in (True, False):
        for name, text, is_one in (*cases, ("email", "a" * 65 + "@c", False)):
            form = json.dumps({"type": ["string", "null"], "format": name})
            grammar = Grammar(GrammarKind.JSON_SCHEMA, form, lenient)
            matcher = library.LLMatcher(tokenizer, source_of(grammar), limits=parser_limits())
            written = list(json.dumps(text).encode())
            is_read = matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()
            assert is_read == is_one
    tool = Tool("f", "", {"properties": {"at": {"type": "string", "format": "date"}}}, strict=True)
    assert "02-29" in Rules({}).arguments(tool)


def test_what_stands_beside_a_form_stays() -> None:
    date = {"pattern": PATTERNS["date"]}
    for stated, expected in (
        ({"format": "date", "pattern": "^2"}, {"pattern": "^2", "allOf": [date]}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"format": "email", "pattern": "@b$"}, {"format": "email", "pattern": "@b$"}),
        ({"format": {"format": "date"}}, {"format": date}),  # a property of that name
        ({"enum": [{"format": "date"}]}, {"enum": [{"format": "date"}]}),
        ({"anyOf": [{"format": "date"}, True]}, {"anyOf": [date, True]}),
    ):
        assert with_forms(stated, values=("enum",)) == expected
