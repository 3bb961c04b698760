"""Reads what the answer of a plain request must match, in the spellings of vLLM and of Triton's
vLLM backend: ``structured_outputs``, ``guided_decoding``, and ``guided_…``."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from protocol import Grammar, GrammarKind, InvalidGrammar, excerpt
from worker.errors import InvalidCall


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, _json(value), lenient=True)


def _of(kind: GrammarKind) -> Callable[[Any], Grammar]:
    return lambda value: Grammar(kind, _json(value))


_KINDS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": _schema,
    "regex": _of(GrammarKind.REGEX),
    "choice": _of(GrammarKind.CHOICE),
    "grammar": _of(GrammarKind.LARK),
    "json_object": lambda value: Grammar(GrammarKind.JSON_OBJECT),
    "structural_tag": _of(GrammarKind.STRUCTURAL_TAG),
}
_NO_KINDS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
"""vLLM's options that change nothing here."""
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_WHOLE = ("structured_outputs", "guided_decoding")
FIELDS = (*_WHOLE, *_GUIDED)
"""Parameters that are read here."""


def read_grammar(stated: Mapping[str, Any]) -> Grammar | None:
    """The grammar that ``stated`` parameters ask for; None for none. Raises ``InvalidCall``."""
    asked: list[tuple[str, str, Any]] = []
    for field in _WHOLE:
        asked += ((field, kind, value) for kind, value in _options(field, stated.get(field)))
    for field, kind in _GUIDED.items():
        if stated.get(field) is not None:
            asked.append((field, kind, stated[field]))
    if not asked:
        return None
    field, kind, value = asked[0]
    if len(asked) > 1:
        raise InvalidCall(f"{field} and {asked[1][0]}: expected one thing that the text must match")
    try:
        grammar = _KINDS[kind](value)
        grammar.check()
    except (InvalidGrammar, ValueError, RecursionError) as error:
        raise InvalidCall(f"{field}: {excerpt(error, 200)}") from None
    return grammar


def _options(field: str, value: Any) -> list[tuple[str, Any]]:
    """What an object states, which may stand in a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidCall(f"{field} must be a JSON object") from None
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InvalidCall(f"{field} must be a JSON object")
    found = [
        (kind, one) for kind, one in value.items() if one not in (None, False) and kind in _KINDS
    ]
    unknown = [kind for kind in value if kind not in _KINDS and kind not in _NO_KINDS]
    if len(found) != 1 or unknown:
        raise InvalidCall(f"{field}: expected exactly one of {', '.join(_KINDS)}")
    return found
