"""JSON to a type, with errors that name the field that is wrong and what it may be."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import msgspec
import msgspec.inspect as types

from orchestrator.api.http.ignored import passed_over
from orchestrator.api.http.message_types import with_unknown_fields
from orchestrator.api.http.unknown_fields import put_down_unknown
from orchestrator.errors import InvalidRequest
from protocol import excerpt

T = TypeVar("T")

_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")
_INDEX = re.compile(r"\[\d+\]")
_STEP = re.compile(r"[^.\[\]]+")


class Reader(Generic[T]):
    """Reads JSON as a type: strictly, or, where the request is read tolerantly (``passing_over``),
    ignoring fields that the type lacks and accepting numbers in strings.

    Reading tolerantly costs nothing extra for a text without such fields: the same decoding tells.
    """

    @overload
    def __init__(self, kind: type[T], *, strict: bool = True) -> None: ...
    @overload
    def __init__(self, kind: Any, *, strict: bool = True) -> None: ...
    def __init__(self, kind: Any, *, strict: bool = True) -> None:
        """``strict`` is msgspec's: whether a number in a string is refused."""
        self.type = kind
        self._exact: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind, strict=strict)

    def read(self, text: str | msgspec.Raw, place: str = "") -> T:
        """Read ``text``, which stands at ``place`` in a body. Raises ``msgspec.DecodeError``."""
        ignored = passed_over()
        if ignored is None:
            return self._exact.decode(text)
        try:
            return self._closed.decode(text)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN_FIELD.search(str(error))
            if unknown is None:
                raise
            at = _AT.search(str(error))
        value = self._open.decode(text)
        if not put_down_unknown(text, self._shape, place, ignored):
            ignored.add(_joined(place, _INDEX.sub("[]", at[1]) if at else ""), unknown[1])
            ignored.has_more = True
        return value

    @cached_property
    def _closed(self) -> "msgspec.json.Decoder[T]":
        """Decoder that refuses unknown fields even in types that allow them, so that they are
        noticed."""
        kind = with_unknown_fields(self.type, forbidden=True)
        return msgspec.json.Decoder(kind, strict=False)

    @cached_property
    def _open(self) -> "msgspec.json.Decoder[T]":
        kind = with_unknown_fields(self.type, forbidden=False)
        return msgspec.json.Decoder(kind, strict=False)

    @cached_property
    def _shape(self) -> types.Type:
        return types.type_info(self.type)


def decode(body: bytes, reader: Reader[T]) -> T:
    """Read bytes as ``reader``'s type. Raises ``InvalidRequest`` naming the field that is wrong."""
    if not body.strip():
        raise InvalidRequest("the body is empty; expected a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        return reader.read(text)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), reader.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def decode_part(part: msgspec.Raw, reader: Reader[T], field: str) -> T:
    """Read a part of a body that was left raw, at ``field``, as ``reader``'s type. Raises
    ``InvalidRequest``."""
    try:
        return reader.read(part, field)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), reader.type, field) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from None


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer and inner and inner[0] != "[" else outer + inner


def _invalid(message: str, expected: type, inside: str = "") -> InvalidRequest:
    where = _AT.search(message)
    own = where[1] if where else ""
    path = _joined(inside, own)
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
