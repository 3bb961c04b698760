"""Grammars of tool calls in the formats of model families: for forced calls, and for tools whose
arguments must always match their schema.

If each argument has its own tags, arguments have the schema's order and optional ones may be
missing. A string is any text before its end tag. Other values are JSON.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.parsing import harmony
from orchestrator.parsing.calls import (
    DeepSeekCall,
    DeepSeekReader,
    HermesReader,
    KimiCall,
    KimiReader,
    MistralReader,
)
from orchestrator.parsing.formats import READERS, CallFormat, OutputFormat
from orchestrator.parsing.parser import ToolUse
from orchestrator.parsing.rules import AnswerGrammars, Rules, beginnings, quoted, without_notes
from orchestrator.parsing.tagged_call import (
    GLM45,
    QWEN3_CODER,
    TagSyntax,
    types_of,
)
from orchestrator.tasks.job import JsonObject, Tool
from protocol import Grammar, GrammarKind, InvalidGrammar
from protocol.grammar_source import schema_with_options

_MAX_ARGUMENTS = 16
"""Most arguments of a tool without a list of its arguments."""
_DEFINITIONS = ("$defs", "definitions")
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")
"""String keywords of a schema that cannot be enforced for text in tags."""


class TaggedRules:
    def __init__(self, syntax: TagSyntax, rules: Rules) -> None:
        self._syntax = syntax
        self._rules = rules
        self._line = "\n" if syntax.on_lines else ""
        self._end = (f"{self._line}", syntax.value[1], "\n")
        self._text = ""
        """The rule for any text up to the end of a value; empty until it is made."""

    def call(self, tool: Tool, prefix: str) -> str:
        """A rule for a call of a tool, from the tool's name to the call's end. Names of its inner
        rules begin with ``prefix``. Raises ``InvalidGrammar`` for a strict tool that cannot be
        enforced."""
        before, behind = self._syntax.name
        terms = [self._rules.spelled(before, tool.name, behind, "\n")]
        parameters = tool.parameters or {}
        properties = parameters.get("properties")
        required = parameters.get("required")
        if isinstance(properties, Mapping):
            for at, (key, schema) in enumerate(properties.items()):
                name = f"{prefix}_{at}"
                if tool.strict:
                    _require_free_text(tool, key, schema)
                self._rules.add(name, self._argument(tool, key, schema, name))
                is_required = isinstance(required, list) and key in required
                terms.append(name if is_required else f"{name}?")
        else:
            key_rule = self._rules.add(f"{prefix}_key", "/[A-Za-z0-9_.-]{1,64}/")
            any_one = self._rules.add(
                f"{prefix}_any",
                f"{self._rules.spelled(self._syntax.key[0])} {key_rule} "
                f"{self._rules.spelled(*self._behind_key())} {self._any_text()}",
            )
            terms.append(f"{any_one}{{0,{_MAX_ARGUMENTS}}}")
        return " ".join([*terms, self._rules.spelled(self._syntax.end)])

    def _argument(self, tool: Tool, key: str, schema: object, name: str) -> str:
        head = self._rules.spelled(self._syntax.key[0], key, *self._behind_key())
        parameters = tool.parameters or {}
        types = types_of(parameters, key)
        words = _words(schema)
        if words:
            value = f"({' | '.join(map(quoted, words))}) {self._rules.spelled(*self._end)}"
        elif not types or "string" in types:
            value = self._any_text()
        else:
            assert isinstance(schema, Mapping)  # otherwise it has no types
            shared = {at: parameters[at] for at in _DEFINITIONS if at in parameters}
            json = self._rules.add(
                f"{name}_json", self._rules.json({**shared, **schema}, lenient=not tool.strict)
            )
            value = f"{json} {self._rules.spelled(*self._end)}"
        return f"{head} {value}"

    def _behind_key(self) -> tuple[str, ...]:
        value = self._syntax.value[0]
        return (self._syntax.key[1], *(("\n", value) if value else ()), self._line)

    def _any_text(self) -> str:
        self._text = self._text or self._rules.text_up_to("text", *self._end)
        return self._text


def _words(schema: object) -> list[str]:
    """The allowed strings of a value if its schema lists only strings; otherwise empty."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values


def _require_free_text(tool: Tool, key: str, schema: JsonObject | object) -> None:
    if isinstance(schema, Mapping) and "string" in types_of(tool.parameters, key):
        for keyword in _OF_TEXT:
            if keyword in schema:
                raise InvalidGrammar(
                    f"{keyword} of {key!r} in {tool.name!r} cannot be enforced in this model's "
                    'format of tool calls; send "strict": false to ignore it'
                )


MAX_CALLS = 16
"""Most calls in one answer with forced calls: a weak model would not stop by itself."""


def forced_calls(use: ToolUse, format: OutputFormat, rules: Rules) -> AnswerGrammars:
    """Grammars that match only calls: one call, or several if request and format allow this. If the
    format has tags for thinking, the model may think first. ``rules`` are a new grammar's rules.
    Raises ``InvalidGrammar`` for a strict tool with a schema that cannot be enforced."""
    if format.calls is CallFormat.GEMMA4:  # no grammar can express schemas of its arguments
        raise InvalidGrammar(
            f"calls in the format {format.calls} cannot be forced; tool_choice must be auto or none"
        )
    calls = _Calls(use, format, rules).rule()
    beginning = beginnings(format, rules)

    def behind(start: str) -> Grammar:
        lines = [*rules.lines, f"start: {start}{calls}"]
        return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")

    begun = None if beginning.begun is None else behind(beginning.begun)
    return AnswerGrammars(behind(beginning.usual), begun, behind(""))


def strict_calls(use: ToolUse, format: OutputFormat, rules: Rules) -> Grammar | None:
    """A grammar with free text and well-formed calls. Calls of strict tools match their schemas.
    None if no tool is strict, or if calls in the format do not begin with text."""
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
    """A grammar that matches tool calls or the JSON of ``answer``. None if ``answer`` is not a JSON
    grammar, or if calls in the format cannot be distinguished from it. Raises ``InvalidGrammar``.
    """
    if answer.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        return None
    if format.calls in (CallFormat.LLAMA3, CallFormat.HARMONY, CallFormat.GEMMA4):
        return None
    calls = _Calls(use, format, rules).rule()
    try:
        schema = json.dumps(without_notes(schema_with_options(answer)), ensure_ascii=False)
    except (RecursionError, ValueError) as error:
        raise InvalidGrammar(str(error)) from None
    lines = [*rules.lines, f"start: {calls} | answer", f"answer: %json {schema}"]
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


class _Calls:
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
            case CallFormat.KIMI_K2:
                named = self._named(
                    (KimiCall.CALL, "functions."), (KimiCall.SEPARATOR,), "/:[0-9]{1,2}/"
                )
                calls = self._several((), named, (KimiReader.CLOSE,))
                return f"{spelled(KimiReader.BEGIN)} {calls} {spelled(KimiReader.END)}"
            case CallFormat.DEEPSEEK:
                return self._deepseek()
            case CallFormat.HARMONY:  # only one call: its end is the end of the output
                to = f"commentary to={harmony.FUNCTIONS}"
                behind = (" ", harmony.CONSTRAIN, "json", harmony.MESSAGE)
                return self._named((harmony.CHANNEL, to), behind)
            case CallFormat.MISTRAL if self._format.names_first:
                return self._several((), self._named((MistralReader.MARK,), (MistralReader.ARGS,)))
            case listed:
                assert listed is not None  # otherwise there are no calls to force
                calls = self._several((), self._objects("arguments"), (), ", ")
                reader = READERS[listed]
                return f"{spelled(reader.marks[0], '[')} {calls} {spelled(']', *reader.behind)}"

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
        """A rule for an object with a name and, in the field ``key``, the arguments."""
        heads = [f'{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in self._tools]
        return self._any_of(
            f'{quoted(head)} {self._arguments(n)} "}}"' for n, head in enumerate(heads)
        )

    def _named(self, before: Sequence[str], behind: Sequence[str], number: str = "") -> str:
        """A rule for a name between ``before`` and ``behind``, with a ``number`` at its end if the
        format has one, followed by the arguments."""
        tail = self._rules.spelled(*behind)
        return self._any_of(
            f"{self._rules.spelled(*before, tool.name)} {number} {tail} {self._arguments(n)}"
            for n, tool in enumerate(self._tools)
        )

    def _tagged(self, syntax: TagSyntax) -> str:
        tagged = TaggedRules(syntax, self._rules)
        return self._any_of(tagged.call(tool, f"args_{n}") for n, tool in enumerate(self._tools))

    def _arguments(self, n: int) -> str:
        return self._rules.add(f"args_{n}", self._rules.arguments(self._tools[n]))

    def _any_of(self, calls: Iterable[str]) -> str:
        """A rule for a call of any one tool. Each tool has its own rule."""
        names = [self._rules.add(f"tool_{n}", call) for n, call in enumerate(calls)]
        return self._rules.add("body", " | ".join(names))

    def _several(
        self, head: Sequence[str], body: str, tail: Sequence[str] = (), between: str = ""
    ) -> str:
        """One ``body`` between ``head`` and ``tail``, or up to the allowed number of them."""
        parts = [self._rules.spelled(*head), body, self._rules.spelled(*tail)]
        call = self._rules.add("call", " ".join(filter(None, parts)))
        if not self._more:
            return call
        return f"{call} ({quoted(between) if between else ''} {call}){{0,{self._more}}}"
