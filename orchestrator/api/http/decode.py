"""JSON to a type, with errors that name the field that is wrong and what it may be."""

import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import msgspec.inspect as types

from orchestrator.errors import InvalidRequest
from worker.protocol import excerpt

T = TypeVar("T")

_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")
_STEP = re.compile(r"[^.\[\]]+")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Bytes as ``decoder``'s type. Raises ``InvalidRequest`` naming the field that is wrong."""
    if not body.strip():
        raise InvalidRequest("the body is empty; expected a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def decode_part(part: msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str) -> T:
    """The same for what was left raw of a body, at ``field``."""
    try:
        return decoder.decode(part)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type, field) from None
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from None


def _invalid(message: str, expected: type, inside: str = "") -> InvalidRequest:
    where = _AT.search(message)
    own = where[1] if where else ""
    path = f"{inside}.{own}" if inside and own and own[0] != "[" else inside + own
    message = _AT.sub("", message)
    path = excerpt(path)
    for pattern, wording in (
        (_UNKNOWN_FIELD, "is not a known field"),
        (_MISSING_FIELD, "is required"),
    ):
        match = pattern.search(message)
        if match:
            field = excerpt(f"{path}.{match[1]}" if path else match[1])
            return InvalidRequest(f"{field}: {wording}", field=field)
    message = excerpt(message, 200)
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    if message.startswith(("Invalid enum value", "Invalid value")):
        choices = ", ".join(choices_at(expected, own))
        if choices:
            message = f"{message}; expected one of: {choices}"
    return InvalidRequest(f"{path}: {message}", field=path)


def choices_at(body: type, path: str) -> list[str]:
    """The values that ``body`` allows at ``path`` (``messages[0].role``); empty if it is open."""
    places = list(_alternatives(types.type_info(body)))
    steps = _STEP.findall(path)
    for step in steps[:-1]:
        places = [inner for place in places for inner in _inside(place, step)]
    return [choice for place in places for choice in _choices(place, steps[-1])]


def _choices(place: types.Type, step: str) -> Iterator[str]:
    if isinstance(place, types.StructType) and place.tag_field == step:
        yield str(place.tag)
    for inner in _inside(place, step):
        if isinstance(inner, types.EnumType):
            yield from (str(member.value) for member in inner.cls)
        elif isinstance(inner, types.LiteralType):
            yield from map(str, inner.values)


def _inside(place: types.Type, step: str) -> Iterator[types.Type]:
    if isinstance(place, types.StructType):
        for field in place.fields:
            if field.encode_name == step:
                yield from _alternatives(field.type)
    elif isinstance(place, types.ListType | types.VarTupleType):
        yield from _alternatives(place.item_type)


def _alternatives(place: types.Type) -> Iterator[types.Type]:
    if isinstance(place, types.UnionType):
        yield from place.types
    else:
        yield place
