"""Rules for a call that has each argument in tags of its own.

Arguments come in the schema's order, optional ones may be missing. A string is any text up to its
end tag; another value is JSON.
"""

from collections.abc import Mapping

from orchestrator.parsing.rules import Rules, quoted
from orchestrator.parsing.tagged_call import TagSyntax, types_of
from orchestrator.tasks.tools import JsonObject, Tool
from protocol import InvalidGrammar

_MAX_ARGUMENTS = 16
"""Most arguments of a tool that does not say which it has."""
_DEFINITIONS = ("$defs", "definitions")
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")
"""Keywords for strings in a schema that text in tags cannot be held to."""


class TaggedRules:
    """The rules for tagged calls of one grammar."""

    def __init__(self, syntax: TagSyntax, rules: Rules) -> None:
        self._syntax = syntax
        self._rules = rules
        self._line = "\n" if syntax.on_lines else ""
        self._end = (f"{self._line}", syntax.value[1], "\n")
        self._text = ""
        """The rule for any text and the end of a value; empty until it is made."""

    def call(self, tool: Tool, prefix: str) -> str:
        """A rule for a call of a tool, from its name to the call's end; ``prefix`` names the
        rules that it needs. Raises ``InvalidGrammar`` for a strict tool whose schema cannot be
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
            assert isinstance(schema, Mapping)  # or it would say nothing of types
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
    """The strings that a value may be, where its schema lists only strings; else empty."""
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
                    'format of tool calls; "strict": false passes over it'
                )
