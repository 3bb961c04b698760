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
"""One way to space JSON, as the templates do: otherwise a weak model writes spaces for ever."""
_PATTERN = '"pattern"'
_NOTES = ("description", "title", "$comment", "$schema")
_VALUES = ("const", "enum", "default", "examples")
"""Keys with values that are not schemas."""


class Rules:
    """The rules of one grammar, and how texts and markers are spelled in them."""

    def __init__(self, special: Mapping[int, str]) -> None:
        """``special`` are the ids of markers that are special tokens."""
        self.lines: list[str] = []
        self._ids = {marker: f"<[{token_id}]>" for token_id, marker in special.items()}

    def add(self, name: str, rule: str) -> str:
        self.lines.append(f"{name}: {rule}")
        return name

    def spelled(self, *parts: str) -> str:
        """Terms for texts and markers, one after the other; empty for none."""
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
        """A term for JSON of a schema; ``lenient``: parts that cannot be enforced are ignored."""
        prepared = self._prepared(schema, lenient)
        text = json.dumps(prepared, ensure_ascii=False)
        if lenient and _PATTERN in text:  # few have any
            text = json.dumps(without_look_around(prepared), ensure_ascii=False)
        return f"%json {text}"

    def arguments(self, tool: Tool) -> str:
        """A term for JSON of a tool's arguments; strict unless the tool is not."""
        return self.json(_as_object(tool), lenient=not tool.strict)

    def schema_of(self, tool: Tool) -> JsonObject:
        """The schema of a strict tool's arguments, as a grammar has it."""
        return self._prepared(_as_object(tool), lenient=False)

    def _prepared(self, schema: JsonObject, lenient: bool) -> JsonObject:
        stated = closed(without_notes(schema))
        options = {**_JSON_AS_WRITTEN, "lenient": lenient, "coerce_one_of": lenient}
        return {**stated, "x-guidance": options}


def _as_object(tool: Tool) -> JsonObject:
    """A tool's schema, made to require an object whatever else it says."""
    return {**(tool.parameters or {}), "type": "object"}


def without_notes(schema: JsonObject) -> dict[str, object]:
    """The schema without annotations: a grammar's size is bounded, and they may hold any text."""
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
    """Terms of a grammar for what precedes an answer; empty where nothing may."""

    usual: str = ""
    """Where the prompt has nothing of the thinking: the model may think."""
    begun: str | None = None
    """The prompt's end within the thinking; None for a format without it."""


class AnswerGrammars(NamedTuple):
    """Grammars of one answer, by what the prompt has of the model's thinking."""

    usual: Grammar
    begun: Grammar | None
    over: Grammar
    """Where the prompt ends behind the thinking."""


def beginnings(format: OutputFormat, rules: Rules) -> Beginnings:
    """What precedes an answer in ``format``, as terms that belong to ``rules``."""
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
    """A client's grammar for the answer alone; ``rules`` are those of a new grammar."""
    beginning, header = beginnings(format, rules), ""
    if format.calls is CallFormat.HARMONY:
        header = rules.spelled(harmony.CHANNEL, "final", harmony.MESSAGE)

    def after(start: str) -> Grammar:
        if not (start or header):
            return grammar
        return grammar.behind("\n".join([*rules.lines, f"before: {start}{header}"]) + "\n")

    begun = None if beginning.begun is None else after(beginning.begun)
    return AnswerGrammars(after(beginning.usual), begun, after(""))
