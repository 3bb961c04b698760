"""Grammars of tool calls, in the formats of model families: for calls that must be made, and for
tools whose arguments must match their schema whenever the model calls them."""

import json
from collections.abc import Iterable, Sequence

from orchestrator.parsing import harmony
from orchestrator.parsing.calls import DeepSeekCall, DeepSeekReader, HermesReader, MistralReader
from orchestrator.parsing.formats import CallFormat, OutputFormat
from orchestrator.parsing.rules import Rules, quoted, without_notes
from orchestrator.parsing.tagged_call import GLM45, QWEN3_CODER, TagSyntax
from orchestrator.parsing.tagged_grammar import TaggedRules
from orchestrator.parsing.thinking import AnswerGrammars, beginnings
from orchestrator.parsing.tool_use import ToolUse
from protocol import Grammar, GrammarKind, InvalidGrammar
from protocol.grammar_source import schema_with_options

MAX_CALLS = 16
"""Most calls in one answer that must have some: a weak model would not stop by itself."""


def forced_calls(use: ToolUse, format: OutputFormat, rules: Rules) -> AnswerGrammars:
    """The grammars that only calls match: one, or several where the request and the format allow
    that. Before them the model may think, where its format has tags for that; ``rules`` are those
    of a new grammar. Raises ``InvalidGrammar`` for a strict tool whose schema cannot be
    enforced."""
    calls = _Calls(use, format, rules).rule()
    beginning = beginnings(format, rules)

    def behind(start: str) -> Grammar:
        lines = [*rules.lines, f"start: {start}{calls}"]
        return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")

    begun = None if beginning.begun is None else behind(beginning.begun)
    return AnswerGrammars(behind(beginning.usual), begun, behind(""))


def strict_calls(use: ToolUse, format: OutputFormat, rules: Rules) -> Grammar | None:
    """A grammar in which text is free and calls are well-formed: those of strict tools match their
    schemas. None where no tool is strict, or the format has no text that a call begins with."""
    if format.calls is not CallFormat.HERMES or not any(tool.strict for tool in use.tools):
        return None
    if not rules.is_all_text(HermesReader.OPEN, HermesReader.CLOSE):
        return None
    structures = [
        {
            "begin": f'{HermesReader.OPEN}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "schema": rules.schema_of(tool) if tool.strict else {"type": "object"},
            "end": f"}}\n{HermesReader.CLOSE}",
        }
        for tool in use.tools
    ]
    stated = {"structures": structures, "triggers": [HermesReader.OPEN]}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(stated, ensure_ascii=False))


def calls_or_json(
    answer: Grammar, use: ToolUse, format: OutputFormat, rules: Rules
) -> Grammar | None:
    """A grammar that tool calls match, and else the JSON of ``answer``. None where ``answer`` is no
    grammar of JSON, or a call in the format could not be told from it. Raises ``InvalidGrammar``.
    """
    if answer.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        return None
    if format.calls in (CallFormat.LLAMA3, CallFormat.HARMONY):
        return None
    calls = _Calls(use, format, rules).rule()
    try:
        schema = json.dumps(without_notes(schema_with_options(answer)), ensure_ascii=False)
    except (RecursionError, ValueError) as error:
        raise InvalidGrammar(str(error)) from None
    lines = [*rules.lines, f"start: {calls} | answer", f"answer: %json {schema}"]
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


class _Calls:
    """Rules for the calls of a request's tools."""

    def __init__(self, use: ToolUse, format: OutputFormat, rules: Rules) -> None:
        self._format = format
        self._rules = rules
        self._tools = use.callable
        self._more = 0 if use.only_one_call else MAX_CALLS - 1

    def rule(self) -> str:
        """A term for all calls of an answer."""
        spelled = self._rules.spelled
        open, close = HermesReader.OPEN, HermesReader.CLOSE
        match self._format.calls:
            case CallFormat.HERMES:
                return self._several((open, "\n"), self._objects("arguments"), ("\n", close), "\n")
            case CallFormat.LLAMA3:
                return self._objects("parameters")
            case CallFormat.QWEN3_CODER:
                return self._several((open, "\n"), self._tagged(QWEN3_CODER), ("\n", close), "\n")
            case CallFormat.GLM45:
                return self._several((open,), self._tagged(GLM45), (), "\n")
            case CallFormat.DEEPSEEK:
                return self._deepseek()
            case CallFormat.HARMONY:  # only one: with its end the output ends
                to = f"commentary to={harmony.FUNCTIONS}"
                behind = (" ", harmony.CONSTRAIN, "json", harmony.MESSAGE)
                return self._named((harmony.CHANNEL, to), behind)
            case CallFormat.MISTRAL if self._format.names_first:
                return self._several((), self._named((MistralReader.MARK,), (MistralReader.ARGS,)))
            case _:
                calls = self._several((), self._objects("arguments"), (), ", ")
                return f'{spelled(MistralReader.MARK, "[")} {calls} "]"'

    def _deepseek(self) -> str:
        before, behind = [DeepSeekCall.CALL], [DeepSeekCall.SEPARATOR]
        tail, between = [DeepSeekReader.CLOSE], ""
        if self._format.in_fences:
            before, behind = [*before, "function", *behind], [f"\n{DeepSeekCall.FENCE}\n"]
            tail, between = ["\n```", *tail], "\n"
        calls = self._several((), self._named(before, behind), tail, between)
        spelled = self._rules.spelled
        return f"{spelled(DeepSeekReader.BEGIN)} {calls} {spelled(DeepSeekReader.END)}"

    def _objects(self, key: str) -> str:
        """An object with a name and, at ``key``, the arguments."""
        heads = [f'{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in self._tools]
        return self._any_of(
            f'{quoted(head)} {self._arguments(n)} "}}"' for n, head in enumerate(heads)
        )

    def _named(self, before: Sequence[str], behind: Sequence[str]) -> str:
        """A name between ``before`` and ``behind``, and then the arguments."""
        return self._any_of(
            f"{self._rules.spelled(*before, tool.name, *behind)} {self._arguments(n)}"
            for n, tool in enumerate(self._tools)
        )

    def _tagged(self, syntax: TagSyntax) -> str:
        """A name, and then each argument in tags."""
        tagged = TaggedRules(syntax, self._rules)
        return self._any_of(tagged.call(tool, f"args_{n}") for n, tool in enumerate(self._tools))

    def _arguments(self, n: int) -> str:
        return self._rules.add(f"args_{n}", self._rules.arguments(self._tools[n]))

    def _any_of(self, calls: Iterable[str]) -> str:
        """A call of any one tool, each by a rule of its own."""
        names = [self._rules.add(f"tool_{n}", call) for n, call in enumerate(calls)]
        return self._rules.add("body", " | ".join(names))

    def _several(
        self, head: Sequence[str], body: str, tail: Sequence[str] = (), between: str = ""
    ) -> str:
        """One ``body`` between ``head`` and ``tail``, or as many as there may be."""
        parts = [self._rules.spelled(*head), body, self._rules.spelled(*tail)]
        call = self._rules.add("call", " ".join(filter(None, parts)))
        if not self._more:
            return call
        return f"{call} ({quoted(between) if between else ''} {call}){{0,{self._more}}}"
