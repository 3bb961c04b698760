"""Translates a ``Grammar`` for llguidance and checks it, on both sides, so that they agree.

The library's limits bound a grammar's work and memory; this module checks what they miss. Grammars
are clients' text, so no part of them is logged.
"""

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from protocol.closed_schema import closed
from protocol.excerpt import excerpt
from protocol.grammar import Grammar, GrammarKind, InvalidGrammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

_COMPACT: Final["JsonCompileOptions"] = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}
_LOOK_AROUND: Final = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Look-around and back references, which the library does not support."""
_NO_PATTERN: Final = "pattern with look-around"
_VALUES: Final = ("const", "enum", "default", "examples")
"""Schema keywords with values that are not schemas."""
_NOT_ENFORCED: Final = re.compile(
    r"Unimplemented keys: \[(?P<keywords>.*)\]|Unknown format: (?P<format>.{1,64})|(?P<word>[\w/]+)"
)
"""The library's warnings about ignored parts: keywords, a format, or a sentence that begins with
the keyword."""
_LARK_KINDS: Final = (GrammarKind.CHOICE, GrammarKind.LARK, GrammarKind.STRUCTURAL_TAG)
"""Kinds with Lark source instead of the library's JSON."""
_ANSWER: Final = "answer"
_MAX_STATES: Final = 4096
"""Maximum states for ``multipleOf``: the least common multiple of all of them in a schema."""
_MAX_ERROR_CHARS: Final = 240
_ESCAPED_LETTER: Final = re.compile(r"\\u00[4-7]")
_MULTIPLE: Final = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]{1,40})')


def library_version() -> str:
    """Name and version, such as ``llguidance 1.9.1``; empty if it is not installed."""
    try:
        from importlib.metadata import version

        import llguidance  # noqa: F401

        return f"llguidance {version('llguidance')}"
    except ImportError:
        return ""


def parser_limits() -> "LLParserLimits":
    """Limits on one grammar's cost: about 10 ms for a step's mask, about 50 MB for all states."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=30_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def source_of(grammar: Grammar) -> str:
    """The source for llguidance to compile. Raises ``InvalidGrammar``."""
    grammar.check()
    source = _text_source(grammar)
    if not grammar.before:
        return source
    # A separate grammar in the library's JSON, so that both may have rules with the same names.
    is_lark = grammar.kind in _LARK_KINDS
    answer = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
    before = f"start: before @{_ANSWER}\n{grammar.before}"
    grammars = [{"lark_grammar": before}, {**answer, "name": _ANSWER}]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _text_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_source({"type": "object"}, grammar)
        case GrammarKind.JSON_SCHEMA:
            return _json_source(_schema(grammar.text), grammar)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = _choices(grammar.text)
            # An enum becomes one regular expression; Lark would make one rule per value.
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
            )
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(_lark(grammar.text))
        case GrammarKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(_structural_tag(grammar))


def check_source(grammar: Grammar) -> list[str]:
    """Return ``grammar``'s keywords that cannot be enforced and are ignored. Raises
    ``InvalidGrammar`` if llguidance would refuse it. Takes milliseconds, hundreds for a large
    grammar: do not call it on an event loop."""
    from llguidance import LLMatcher

    try:
        source = source_of(grammar)
    except InvalidGrammar:
        raise
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        # Not valid JSON to the library (half a surrogate pair, NaN), or a number is too large.
        said = str(error).encode(errors="replace").decode()  # the message may quote it
        raise InvalidGrammar(problem(said)) from None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, limits=parser_limits())
    if is_error:
        raise InvalidGrammar(problem(messages[0] if messages else ""))
    found: dict[str, None] = {}
    for told in filter(None, map(_NOT_ENFORCED.match, messages)):
        if told["keywords"]:
            names = [name.strip(' "') for name in told["keywords"].split(",")]
        elif told["format"] == _NO_PATTERN:
            names = ["pattern"]
        else:
            names = [f"format={told['format']}" if told["format"] else told["word"]]
        found |= dict.fromkeys(names)
    return list(found)


def problem(message: str) -> str:
    """The library's message, reworded for clients."""
    said = " ".join(message.replace("<non-verbose/>", "").split())
    if "NoExtension" in said:
        return "no text matches the grammar"
    if said.startswith("oneOf"):
        return 'a oneOf whose branches overlap cannot be enforced: "strict": false, or anyOf'
    if said.startswith("Unimplemented keys"):
        said += '; "strict": false ignores what cannot be enforced'
    return f"the grammar cannot be used: {excerpt(said, _MAX_ERROR_CHARS)}"


def schema_with_options(grammar: Grammar) -> dict[str, Any]:
    """The schema of a JSON grammar as compiled, with the library's options in it. Raises
    ``InvalidGrammar``, and ``ValueError`` or ``RecursionError`` if it is not JSON."""
    is_any = grammar.kind is GrammarKind.JSON_OBJECT
    schema = _prepared({"type": "object"} if is_any else _schema(grammar.text), grammar)
    own = schema.get("x-guidance")
    stated = own if isinstance(own, dict) else {}
    return {**schema, "x-guidance": {**_COMPACT, **stated, **_overrides(grammar)}}


def _json_source(schema: Any, grammar: Grammar) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        json.dumps(_prepared(schema, grammar), ensure_ascii=False),
        defaults=_COMPACT,
        overrides=_overrides(grammar),
    )


def _prepared(schema: Any, grammar: Grammar) -> Any:
    if grammar.lenient:
        schema = without_look_around(schema)
    return closed(schema)


def _overrides(grammar: Grammar) -> "JsonCompileOptions":
    # It then treats a oneOf whose branches may overlap as anyOf.
    return {"lenient": grammar.lenient, "coerce_one_of": grammar.lenient}


def without_look_around(schema: Any) -> Any:
    """A copy of ``schema`` without patterns that no grammar supports. Each is replaced by a format
    that the library ignores, so that it is reported like every ignored part."""
    if isinstance(schema, list):
        return [without_look_around(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str) and _LOOK_AROUND.search(value):
            kept.setdefault("format", _NO_PATTERN)
        else:
            kept[key] = value if key in _VALUES else without_look_around(value)
    return kept


def _schema(text: str) -> Any:
    schema = _json(text, "the schema")
    if not isinstance(schema, dict | bool):
        raise InvalidGrammar("the schema must be a JSON object")
    if schema is False:
        raise InvalidGrammar("no text matches the schema")
    if schema is True:
        return {}  # equivalent, and an object to which the library can add its options
    _check_multiples(schema)
    return schema


def _check_multiples(schema: Any) -> None:
    """Raise ``InvalidGrammar`` for too many ``multipleOf`` states: they multiply before any of the
    library's limits applies."""
    states, left = 1, [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            factor = value.get("multipleOf")
            if isinstance(factor, int | float) and factor == factor:
                while factor != int(factor) and factor < _MAX_STATES:
                    factor *= 10
                states = math.lcm(states, max(1, abs(int(min(factor, 2**53)))))
                if states > _MAX_STATES:
                    raise InvalidGrammar(
                        f"the schema's multipleOf take more than {_MAX_STATES} states together"
                    )


def _choices(text: str) -> list[str]:
    choices = _json(text, "the choices")
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(one, str) and one for one in choices)
    ):
        raise InvalidGrammar("the choices must be an array of strings, none of them empty")
    return choices


def _lark(text: str) -> str:
    # It may contain schemas after ``%json``.
    found = _MULTIPLE.findall(text)
    if _ESCAPED_LETTER.search(text) or len(found) != text.count("multipleOf"):
        raise InvalidGrammar('write "multipleOf" plainly, and no letter as \\u00…')
    try:
        multiples = [{"multipleOf": float(number)} for number in found]
    except ValueError:
        raise InvalidGrammar("multipleOf is not a number") from None
    _check_multiples(multiples)
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:
        raise InvalidGrammar(problem(f"{error} (read as GBNF, for its ::=)")) from None


def _structural_tag(grammar: Grammar) -> str:
    from llguidance import StructTag

    tag = _json(grammar.text, "the structural tag")
    options = {"x-guidance": _COMPACT}
    try:
        triggers, tags = tag["triggers"], []
        for structure in tag["structures"]:
            begin = structure["begin"]
            trigger = next(one for one in triggers if one and begin.startswith(one))
            schema = structure.get("schema") or {}
            _check_multiples(schema)
            stated = {**options, **closed(schema)}
            tags.append(
                StructTag(trigger=trigger, begin=begin, grammar=stated, end=structure["end"])
            )
        return StructTag.to_grammar(tags, assume_special=False)
    except InvalidGrammar:
        raise
    except (AssertionError, AttributeError, KeyError, StopIteration, TypeError, ValueError):
        raise InvalidGrammar(
            'a structural tag is {"structures": [{"begin", "schema", "end"}, …], "triggers": […]};'
            " every begin starts with one of the triggers"
        ) from None


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidGrammar(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise InvalidGrammar(f"{what} is not JSON: {error}") from None
