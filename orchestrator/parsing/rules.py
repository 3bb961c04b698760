"""Building blocks for grammars of tool calls: rules in Lark's syntax, and schemas of arguments."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from orchestrator.parsing import harmony
from orchestrator.parsing.formats import CallFormat, OutputFormat
from orchestrator.tasks.job import JsonObject, Tool
from protocol import Grammar
from protocol.closed_schema import closed
from protocol.grammar_source import without_look_around

_JSON_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The templates' JSON spacing as the only one: otherwise a weak model writes endless spaces."""
_PATTERN = '"pattern"'
_NOTES = ("description", "title", "$comment", "$schema")
_VALUES = ("const", "enum", "default", "examples")
"""Keys with values that are not schemas."""


class Rules:
    """The rules of one grammar, and the notation of texts and markers in them."""

    def __init__(self, special: Mapping[int, str]) -> None:
        """``special``: markers that are special tokens, by id."""
        self.lines: list[str] = []
        self._ids = {marker: f"<[{token_id}]>" for token_id, marker in special.items()}

    def add(self, name: str, rule: str) -> str:
        self.lines.append(f"{name}: {rule}")
        return name

    def spelled(self, *parts: str) -> str:
        """Terms for texts and markers in sequence; empty if there are none."""
        terms: list[str] = []
        text = ""
        for part in parts:
            if part in self._ids:
                terms += [quoted(text)] if text else []
                terms.append(self._ids[part])
                text = ""
            else:
                text += part
        return " ".join([*terms, quoted(text)] if text else terms)

    def text_up_to(self, name: str, *end: str) -> str:
        """A rule for any text followed by ``end``."""
        if any(part in self._ids for part in end):
            return self.add(name, f"/(?s:.*)/ {self.spelled(*end)}")
        self.lines.append(f"{name}[suffix={quoted(''.join(end))}]: /(?s:.*)/")
        return name

    def is_all_text(self, *markers: str) -> bool:
        """Whether none of ``markers`` is a special token."""
        return not any(marker in self._ids for marker in markers)

    def json(self, schema: JsonObject, *, lenient: bool) -> str:
        """A term for JSON of a schema. ``lenient``: parts that cannot be enforced are ignored."""
        prepared = self._prepared(schema, lenient)
        text = json.dumps(prepared, ensure_ascii=False)
        if lenient and _PATTERN in text:  # few schemas have patterns
            text = json.dumps(without_look_around(prepared), ensure_ascii=False)
        return f"%json {text}"

    def arguments(self, tool: Tool) -> str:
        """A term for JSON of a tool's arguments; strict if the tool is strict."""
        return self.json(_as_object(tool), lenient=not tool.strict)

    def schema_of(self, tool: Tool) -> JsonObject:
        """The schema of a strict tool's arguments in the form for grammars."""
        return self._prepared(_as_object(tool), lenient=False)

    def _prepared(self, schema: JsonObject, lenient: bool) -> JsonObject:
        stated = closed(without_notes(schema))
        options = {**_JSON_AS_WRITTEN, "lenient": lenient, "coerce_one_of": lenient}
        return {**stated, "x-guidance": options}


def _as_object(tool: Tool) -> JsonObject:
    """A tool's schema, changed to always require an object."""
    return {**(tool.parameters or {}), "type": "object"}


def without_notes(schema: JsonObject) -> dict[str, object]:
    """The schema without annotations: they may have any text, and a grammar's size is bounded."""
    kept: dict[str, object] = {}
    for key, value in schema.items():
        if key in _NOTES and isinstance(value, str):
            continue
        if key not in _VALUES and isinstance(value, Mapping):
            value = without_notes(value)
        elif key not in _VALUES and isinstance(value, list):
            value = [without_notes(one) if isinstance(one, Mapping) else one for one in value]
        kept[key] = value
    return kept


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_SPACE = r'("\n" | "\n\n")?'
"""White space between the thinking and the answer."""


class Beginnings(NamedTuple):
    """Terms of a grammar for the text before an answer; empty if there may be none."""

    usual: str = ""
    """For a prompt without thinking: the model may think."""
    begun: str | None = None
    """For a prompt that ends within the thinking; None for a format without thinking."""


class AnswerGrammars(NamedTuple):
    """Grammars of one answer, by the part of the thinking that the prompt has."""

    usual: Grammar
    begun: Grammar | None
    over: Grammar
    """For a prompt that ends after the thinking."""


def beginnings(format: OutputFormat, rules: Rules) -> Beginnings:
    """Terms for the text before an answer in ``format``. They belong to ``rules``."""
    tags = format.reasoning
    if tags is None:
        return Beginnings()
    if format.calls is CallFormat.HARMONY:
        open = rules.spelled(harmony.CHANNEL, "analysis", harmony.MESSAGE)
        again = rules.spelled(harmony.START, "assistant")
        thought = f"{rules.text_up_to('thought', harmony.END)} {again}"
        return Beginnings(f"({open} {thought})? ")
    thought = f"{rules.text_up_to('thought', tags.close)} {_SPACE} "
    return Beginnings(f"({rules.spelled(tags.open)} {thought})? ", thought)


def behind_thinking(grammar: Grammar, format: OutputFormat, rules: Rules) -> AnswerGrammars:
    """Grammars that apply a client's grammar only to the answer. ``rules`` are a new grammar's."""
    beginning, header = beginnings(format, rules), ""
    if format.calls is CallFormat.HARMONY:
        header = rules.spelled(harmony.CHANNEL, "final", harmony.MESSAGE)

    def after(start: str) -> Grammar:
        if not (start or header):
            return grammar
        return grammar.behind("\n".join([*rules.lines, f"before: {start}{header}"]) + "\n")

    begun = None if beginning.begun is None else after(beginning.begun)
    return AnswerGrammars(after(beginning.usual), begun, after(""))
