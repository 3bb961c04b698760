"""Closes JSON Schemas: their objects then have no other properties than those that are named.

By JSON Schema an object may have any further properties unless ``additionalProperties`` says
otherwise. Authors of schemas for models rarely mean that, and models invent properties. So an
object that names its properties and does not mention others is closed, as in xgrammar. Names that a
pattern allows are listed where they are few: ``^(a|b)_[01]$`` has four.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from re import _constants as of  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

MOST_TEXTS: Final = 64
"""Texts that are counted if no other bound is given. Each becomes a property of a grammar."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand for the anchors while texts are put together."""
_ANCHORS: Final = {
    **dict.fromkeys((of.AT_BEGINNING, of.AT_BEGINNING_STRING), _BEGIN),
    **dict.fromkeys((of.AT_END, of.AT_END_STRING), _END),
}
_FOLDS: Final = re.IGNORECASE.value
_KNOWN_FLAGS: Final = _FOLDS | re.DOTALL.value
_OPPOSITES: Final = (
    {of.CATEGORY_DIGIT, of.CATEGORY_NOT_DIGIT},
    {of.CATEGORY_SPACE, of.CATEGORY_NOT_SPACE},
    {of.CATEGORY_WORD, of.CATEGORY_NOT_WORD},
)
_RUSTS_END: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\z")
"""An anchor that Python spells otherwise."""
_NAMED: Final = re.compile(r"(?<!\\)((?:\\\\)*)\(\?<(?=\w)")
"""The begin of a named group, as JavaScript spells it."""


class _TooMany(Exception):
    """More texts than are counted, or no end of them."""


def texts_of(pattern: str, most: int = MOST_TEXTS) -> list[str] | None:
    """All texts in which ``pattern`` is found; None if they are more than ``most``, or unknown."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what others read otherwise
            parsed = _parsed(pattern)
        flags = parsed.state.flags & ~re.UNICODE.value
        if flags & ~_KNOWN_FLAGS:
            return None
        counting = _Counting(most)
        found = list(dict.fromkeys(counting.folded(counting.sequence(parsed), flags)))
    except (_TooMany, re.error, RecursionError, OverflowError):
        return None
    texts = []
    for text in found:
        inner = text.removeprefix(_BEGIN).removesuffix(_END)
        if len(inner) != len(text) - 2 or _BEGIN in inner or _END in inner:
            return None  # something may be around it
        texts.append(inner)
    return texts


def _parsed(pattern: str) -> Any:
    pattern = _RUSTS_END.sub(r"\1\\Z", pattern)
    try:
        return _parser.parse(pattern)
    except re.error:
        return _parser.parse(_NAMED.sub(r"\1(?P<", pattern))


class _Counting:
    """Counts the texts of parts of a pattern, up to ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most

    def sequence(self, parts: Iterable[Any]) -> list[str]:
        texts = [""]
        for part in parts:
            texts = self._few(a + b for a, b in product(texts, self._texts(*part)))
        return texts

    def folded(self, texts: list[str], flags: int) -> list[str]:
        """The texts in upper and lower case, where ``flags`` say that it does not matter."""
        if not flags & _FOLDS:
            return texts
        each = (product(*[{c.lower(): 0, c.upper(): 0} for c in text]) for text in texts)
        return self._few("".join(letters) for several in each for letters in several)

    def _texts(self, kind: Any, value: Any) -> list[str]:
        """Texts of one part, as ``re`` has parsed it."""
        if kind is of.LITERAL:
            return [chr(value)]
        if kind is of.AT and value in _ANCHORS:
            return [_ANCHORS[value]]
        if kind is of.IN:
            return self._few(_letters(value))
        if kind is of.BRANCH:
            return self._few(text for branch in value[1] for text in self.sequence(branch))
        if kind is of.SUBPATTERN and not (value[1] & ~_KNOWN_FLAGS or value[2]):
            return self.folded(self.sequence(value[3]), value[1])
        if kind in (of.MAX_REPEAT, of.MIN_REPEAT) and value[1] <= self._most:
            least, most, part = value
            return self._few(
                text for n in range(least, most + 1) for text in self.sequence([*part] * n)
            )
        raise _TooMany

    def _few(self, texts: Iterable[str]) -> list[str]:
        found: list[str] = []
        for text in texts:
            if len(found) == self._most:
                raise _TooMany
            found.append(text)
        return found


def _letters(members: list[Any]) -> Iterator[str]:
    if members[0][0] is of.NEGATE:
        kinds = {value for kind, value in members if kind is of.CATEGORY}
        if any(both <= kinds for both in _OPPOSITES):
            return
    for kind, value in members:
        if kind is of.LITERAL:
            yield chr(value)
        elif kind is of.RANGE:
            yield from map(chr, range(value[0], value[1] + 1))
        elif kind is of.CATEGORY and value is of.CATEGORY_DIGIT:
            yield from "0123456789"
        else:
            raise _TooMany


_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object of schemas."""
_LISTS: Final = ("allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("if", "then", "else")
_INSIDE: Final = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties"),
)
"""Keywords with a schema, or a list of them, for the parts of a value."""
_MOST_NAMED: Final = 1024
"""Names of properties up to which it is seen that a pattern matches no other."""

_PARTS: Final = frozenset({*_LISTS, "$ref", "if", "dependentSchemas"})
_WITH_SCHEMAS: Final = frozenset({*_BY_NAME, *_LISTS, *_CONDITIONS, *_INSIDE})


def closed(schema: Any) -> Any:
    """A copy of ``schema`` with its objects closed. An object that several schemas describe
    (``allOf``, or ``properties`` with ``anyOf``) is closed as a whole, to the properties that any
    of them names. Raises ``RecursionError`` if it is nested too deeply."""
    try:
        return _simple(schema)
    except _Composed:
        schema = _without_few(schema)
        return _Closing(schema).copy(schema)


class _Composed(Exception):
    """Several schemas describe one object, or its properties."""


def _without_few(schema: Any) -> Any:
    """A copy in which a pattern that matches few names is replaced by them. llguidance expects one
    more property for a pattern, so a text that begins one after all names are used cannot end."""
    if not isinstance(schema, dict):
        return schema
    result = schema.copy()
    for key in _WITH_SCHEMAS & schema.keys():
        value = schema[key]
        if isinstance(value, list):
            result[key] = [_without_few(one) for one in value]
        elif key in _BY_NAME and isinstance(value, dict):
            result[key] = {name: _without_few(one) for name, one in value.items()}
        else:
            result[key] = _without_few(value)
    patterns, properties = result.get("patternProperties"), result.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return result
    few = {}
    for pattern in patterns:
        names = texts_of(pattern, max(MOST_TEXTS, min(len(properties), _MOST_NAMED)))
        if names is not None and (len(names) <= MOST_TEXTS or properties.keys() >= set(names)):
            few[pattern] = names
    if not few:
        return result
    properties = properties.copy()
    for pattern, names in few.items():
        for name in names:
            own, stated = properties.get(name, True), patterns[pattern]
            properties[name] = stated if own is True else {"allOf": [own, stated]}
    result["properties"] = properties
    result["patternProperties"] = {p: one for p, one in patterns.items() if p not in few}
    if not result["patternProperties"]:
        del result["patternProperties"]
    return result


def _simple(schema: Any) -> Any:
    """Close most schemas in one pass. Raises ``_Composed`` if several describe one object."""
    if not isinstance(schema, dict):
        return schema
    if "patternProperties" in schema:
        raise _Composed
    result = schema.copy()
    for key, value in schema.items():
        if key not in _WITH_SCHEMAS:
            continue
        if isinstance(value, list):
            result[key] = [_simple(one) for one in value]
        elif key in _BY_NAME and isinstance(value, dict):
            result[key] = {name: _simple(one) for name, one in value.items()}
        else:
            result[key] = _simple(value)
    if not _PARTS.isdisjoint(schema):
        if not _is_transparent(schema):
            raise _Composed
    elif "additionalProperties" not in schema and "properties" in schema:
        _close_alone(schema, result)
    return result


def _close_alone(schema: dict[str, Any], result: dict[str, Any]) -> None:
    if result.pop("unevaluatedProperties", False) is not False:
        result["unevaluatedProperties"] = schema["unevaluatedProperties"]
        return
    properties, required = result.get("properties", {}), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        if missing:
            result["properties"] = {**properties, **dict.fromkeys(missing, True)}
    result["additionalProperties"] = False


def resolved(root: Any, reference: object) -> Any:
    """What ``reference`` (``#/…``) names within ``root``; None where it names nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = root
    for part in reference[1:].split("/")[1:]:
        if not isinstance(value, dict):
            return None
        value = value.get(part.replace("~1", "/").replace("~0", "~"))
    return value


@dataclass(slots=True)
class _Named:
    """The properties that the schemas of one object name together."""

    properties: dict[str, Any] = field(default_factory=dict)
    patterns: dict[str, Any] = field(default_factory=dict)
    is_any: bool = False
    """Whether one of the schemas names properties, even an empty set."""
    is_stated: bool = False
    """Whether one of the schemas states which others there may be."""


class _Closing:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._partial: set[int] = set()
        """Ids (``id``) of schemas that describe an object only in part."""
        self._marked: set[tuple[int, bool]] = set()
        self._mark(root, is_partial=False)

    def copy(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                value = {name: self.copy(one) for name, one in value.items()}
            elif key in _LISTS or key in _INSIDE or key in _CONDITIONS:
                value = (
                    [self.copy(o) for o in value] if isinstance(value, list) else self.copy(value)
                )
            result[key] = value
        if id(schema) not in self._partial and not _is_transparent(schema):
            self._close(schema, result)
        return result

    def _close(self, schema: dict[str, Any], result: dict[str, Any]) -> None:
        named = _Named()
        self._gather(schema, named, set())
        if named.is_stated or not named.is_any:
            return
        for key, names in (("properties", named.properties), ("patternProperties", named.patterns)):
            own = result.get(key, {})
            if names and isinstance(own, dict):
                result[key] = names | own
        result.pop("unevaluatedProperties", None)
        result["additionalProperties"] = False

    def _gather(self, schema: dict[str, Any], named: _Named, seen: set[int]) -> None:
        if id(schema) in seen:
            return
        seen.add(id(schema))
        if (
            "additionalProperties" in schema
            or schema.get("unevaluatedProperties", False) is not False
        ):
            named.is_stated = True
        for key, names in (("properties", named.properties), ("patternProperties", named.patterns)):
            if isinstance(stated := schema.get(key), dict):
                named.is_any = True
                names.update(dict.fromkeys(stated, True))
        if isinstance(required := schema.get("required"), list):
            named.properties.update({name: True for name in required if isinstance(name, str)})
        for part in self._parts(schema):
            self._gather(part, named, seen)

    def _mark(self, schema: Any, *, is_partial: bool) -> None:
        if not isinstance(schema, dict) or (id(schema), is_partial) in self._marked:
            return
        self._marked.add((id(schema), is_partial))
        if is_partial:
            self._partial.add(id(schema))
        is_composed = not _is_transparent(schema)
        for part in self._parts(schema):
            self._mark(part, is_partial=is_partial or is_composed)
        if is_composed:
            self._mark_shared(schema)
        for inner in _inside(schema):
            self._mark(inner, is_partial=False)

    def _mark_shared(self, schema: dict[str, Any]) -> None:
        """Mark a property's schemas as partial if several of them hold at once."""
        by_name: dict[str, list[Any]] = {}
        for one in self._conjuncts(schema, set()):
            if isinstance(properties := one.get("properties"), dict):
                for name, inner in properties.items():
                    by_name.setdefault(name, []).append(inner)
        for several in by_name.values():
            for inner in several if len(several) > 1 else ():
                self._mark(inner, is_partial=True)

    def _conjuncts(self, schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
        """The schema, and those that hold together with it."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        yield schema
        several = schema.get("allOf")
        others = [*several] if isinstance(several, list) else []
        for one in (*others, resolved(self._root, schema.get("$ref"))):
            yield from self._conjuncts(one, seen)

    def _parts(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Other schemas of the value that ``schema`` describes."""
        parts = [schema.get(key) for key in _CONDITIONS]
        parts.append(resolved(self._root, schema.get("$ref")))
        for key in _LISTS:
            if isinstance(some := schema.get(key), list):
                parts += some
        if isinstance(some := schema.get("dependentSchemas"), dict):
            parts += some.values()
        return (part for part in parts if isinstance(part, dict))


def _is_transparent(schema: dict[str, Any]) -> bool:
    """Whether ``schema`` leaves an object's description to one other schema, or one of several."""
    of_its_own = ("properties", "patternProperties", "dependentSchemas", "if")
    kinds = [key for key in (*_LISTS, "$ref") if key in schema]
    if len(kinds) != 1 or any(key in schema for key in of_its_own):
        return False
    some = schema[kinds[0]]
    return kinds != ["allOf"] or not isinstance(some, list) or len(some) == 1


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """Schemas of a value's parts, and referenced definitions."""
    for key in _BY_NAME:
        if key != "dependentSchemas" and isinstance(some := schema.get(key), dict):
            yield from some.values()
    for key in _INSIDE:
        value = schema.get(key)
        if isinstance(value, list):
            yield from value
        else:
            yield value
