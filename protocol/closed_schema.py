"""Closes JSON Schemas: their objects then allow only the properties that the schema names.

In JSON Schema, an object may have additional properties unless ``additionalProperties`` forbids
them. Authors of schemas for models rarely want that, and models invent properties. So an object
that names its properties and does not mention others is closed, as in xgrammar. If several schemas
describe one object (``allOf`` next to ``properties``) or a pattern names properties, the schema
keeps JSON Schema's meaning: no part knows the names in the others.
"""

from typing import Any, Final

_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
_LISTS: Final = ("allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("if", "then", "else")
_INSIDE: Final = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties"),
)
"""Keywords whose value is a schema, or a list of schemas, for the parts of a value."""

_PARTS: Final = frozenset({*_LISTS, "$ref", "if", "dependentSchemas"})
_WITH_SCHEMAS: Final = frozenset({*_BY_NAME, *_LISTS, *_CONDITIONS, *_INSIDE})


def closed(schema: Any) -> Any:
    """A copy of ``schema`` with closed objects; ``schema`` itself if several parts of it describe
    one object. Raises ``RecursionError`` if it is nested too deeply."""
    try:
        return _closed(schema)
    except _Composed:
        return schema


class _Composed(Exception):
    """Several schemas describe one object, or its properties."""


def _closed(schema: Any) -> Any:
    """Raises ``_Composed``."""
    if not isinstance(schema, dict):
        return schema
    if "patternProperties" in schema:
        raise _Composed
    result = schema.copy()
    for key, value in schema.items():
        if key not in _WITH_SCHEMAS:
            continue
        if isinstance(value, list):
            result[key] = [_closed(one) for one in value]
        elif key in _BY_NAME and isinstance(value, dict):
            result[key] = {name: _closed(one) for name, one in value.items()}
        else:
            result[key] = _closed(value)
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
    """The part of ``root`` that ``reference`` (``#/…``) names; None if it names nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = root
    for part in reference[1:].split("/")[1:]:
        if not isinstance(value, dict):
            return None
        value = value.get(part.replace("~1", "/").replace("~0", "~"))
    return value


def _is_transparent(schema: dict[str, Any]) -> bool:
    """Whether ``schema`` leaves an object's description to one other schema, or one of several."""
    of_its_own = ("properties", "patternProperties", "dependentSchemas", "if")
    kinds = [key for key in (*_LISTS, "$ref") if key in schema]
    if len(kinds) != 1 or any(key in schema for key in of_its_own):
        return False
    some = schema[kinds[0]]
    return kinds != ["allOf"] or not isinstance(some, list) or len(some) == 1
