"""Grammars of tool calls, in the formats of model families: for calls that must be made, and for
tools whose arguments must match their schema whenever the model calls them."""

import json
from collections.abc import Mapping

from orchestrator.parsing.calls import HermesReader, MistralReader
from orchestrator.parsing.formats import CallFormat, OutputFormat
from orchestrator.parsing.tool_use import ToolUse
from orchestrator.tasks.tools import JsonObject, Tool
from worker.protocol import Grammar, GrammarKind

MOST_CALLS = 16
"""In one answer that must have some: a weak model would not stop by itself."""
_JSON_AS_WRITTEN = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
}
"""One way to space JSON, as the templates do: else a weak model goes on with spaces for ever."""
_NOTES = ("description", "title", "$comment", "$schema")
_VALUES = ("const", "enum", "default", "examples")
"""Keys whose values are no schemas."""


def forced_calls(use: ToolUse, format: OutputFormat, special: Mapping[int, str]) -> Grammar:
    """One that only calls match: one, or several where the request and the format allow that.

    ``special`` are the ids of the format's markers that are special tokens.
    """
    tools = [tool for tool in use.tools if not use.only or tool.name == use.only]
    ids = {marker: f"<[{token_id}]>" for token_id, marker in special.items()}

    def marker(text: str, before: str = "", behind: str = "") -> str:
        if text in ids:
            around = [ids[text]]
            around[:0] = [_quoted(before)] if before else []
            around += [_quoted(behind)] if behind else []
            return " ".join(around)
        return _quoted(before + text + behind)

    more = 0 if use.only_one_call else MOST_CALLS - 1
    rules = [f"args_{n}: %json {_schema(tool)}" for n, tool in enumerate(tools)]
    bodies = " | ".join(f"tool_{n}" for n in range(len(tools)))
    match format.calls:
        case CallFormat.HERMES:
            start = f'call ("\\n" call){{0,{more}}}' if more else "call"
            open, close = marker(HermesReader.OPEN, behind="\n"), marker(HermesReader.CLOSE, "\n")
            rules += [f"start: {start}", f"call: {open} body {close}"]
            rules += _objects(tools, "arguments")
        case CallFormat.LLAMA3:
            rules += ["start: body", *_objects(tools, "parameters")]
        case CallFormat.MISTRAL if format.names_first:
            start = f"call{{1,{more + 1}}}" if more else "call"
            rules += [f"start: {start}", f"call: {marker(MistralReader.MARK)} body"]
            rules += [
                f"tool_{n}: {_quoted(tool.name)} {marker(MistralReader.ARGS)} args_{n}"
                for n, tool in enumerate(tools)
            ]
        case _:
            calls = f'body (", " body){{0,{more}}}' if more else "body"
            rules += [f'start: {marker(MistralReader.MARK, behind="[")} {calls} "]"']
            rules += _objects(tools, "arguments")
    rules.append(f"body: {bodies}")
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def strict_calls(use: ToolUse, format: OutputFormat, special: Mapping[int, str]) -> Grammar | None:
    """One in which text is free, and calls are well-formed: those of strict tools match their
    schemas. None where no tool is strict, or a format has no text that a call begins with."""
    if format.calls is not CallFormat.HERMES or special or not any(t.strict for t in use.tools):
        return None
    structures = [
        {
            "begin": f'{HermesReader.OPEN}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "schema": json.loads(_schema(tool)) if tool.strict else {"type": "object"},
            "end": f"}}\n{HermesReader.CLOSE}",
        }
        for tool in use.tools
    ]
    stated = {"structures": structures, "triggers": [HermesReader.OPEN]}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(stated, ensure_ascii=False))


def _objects(tools: list[Tool], key: str) -> list[str]:
    return [
        f"tool_{n}: " + _quoted(f'{{"name": {json.dumps(tool.name)}, "{key}": ') + f' args_{n} "}}"'
        for n, tool in enumerate(tools)
    ]


def _schema(tool: Tool) -> str:
    """Of its arguments: an object, whatever else."""
    stated: JsonObject = tool.parameters or {}
    schema = {**_without_notes(stated), "type": "object", **_JSON_AS_WRITTEN}
    return json.dumps(schema, ensure_ascii=False)


def _without_notes(schema: JsonObject) -> dict[str, object]:
    """What decides nothing is left out: a grammar's size is bounded, and any text may be in it."""
    kept: dict[str, object] = {}
    for key, value in schema.items():
        if key in _NOTES and isinstance(value, str):
            continue
        if key not in _VALUES and isinstance(value, Mapping):
            value = _without_notes(value)
        elif key not in _VALUES and isinstance(value, list):
            value = [_without_notes(one) if isinstance(one, Mapping) else one for one in value]
        kept[key] = value
    return kept


def _quoted(text: str) -> str:
    """A literal of Lark's."""
    return json.dumps(text, ensure_ascii=False)
