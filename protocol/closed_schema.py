"""Closes JSON Schemas: their objects then have no other properties than those that are named.

By JSON Schema an object may have any further properties unless ``additionalProperties`` says
otherwise. Authors of schemas for models rarely mean that, and models invent properties. So an
object that names its properties and does not mention others is closed, as in xgrammar.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.finite_pattern import MOST_TEXTS, texts_of

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
