"""Decodes JSON to a type. Errors name the wrong field and its valid values.

If unknown fields are ignored, a second pass compares the text with the type to find their names.
That pass does not look inside unknown fields and raw parts.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import msgspec.inspect as types

from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.ignored import Ignored, passed_over
from orchestrator.errors import InvalidRequest
from protocol import excerpt

T = TypeVar("T")

_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")
_INDEX = re.compile(r"\[\d+\]")
_STEP = re.compile(r"[^.\[\]]+")


class Reader(Generic[T]):
    """Reads JSON as a type: strictly or tolerantly (``passing_over``). Tolerant reading ignores
    unknown fields and accepts numbers in strings. It costs nothing if there are no such fields."""

    def __init__(self, kind: Any) -> None:
        self.type = kind

    def read(self, text: str | msgspec.Raw, place: str = "") -> T:
        """Read ``text``, the part of a body at ``place``. Raises ``msgspec.DecodeError``."""
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
    def _exact(self) -> "msgspec.json.Decoder[T]":
        return msgspec.json.Decoder(self.type)

    @cached_property
    def _closed(self) -> "msgspec.json.Decoder[T]":
        """Refuses unknown fields, even in types that allow them, to detect them."""
        kind = with_unknown_fields(self.type, forbidden=True)
        return msgspec.json.Decoder(kind, strict=False)

    @cached_property
    def _open(self) -> "msgspec.json.Decoder[T]":
        kind = with_unknown_fields(self.type, forbidden=False)
        return msgspec.json.Decoder(kind, strict=False)

    @cached_property
    def _shape(self) -> types.Type:
        return types.type_info(self.type)


_readers: dict[type, Reader[Any]] = {}


def decode(body: bytes, kind: type[T]) -> T:
    """Read a body as ``kind``. Raises ``InvalidRequest`` that names the wrong field."""
    if not body.strip():
        raise InvalidRequest("the body is empty; expected a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        reader: Reader[T] = _readers.setdefault(kind, Reader(kind))
        return reader.read(text)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable("the body", error) from None


def decode_part(part: msgspec.Raw, reader: Reader[T], field: str, place: str = "") -> T:
    """Read a raw part of a body at ``field``. ``place`` is that path without list indexes. Raises
    ``InvalidRequest``."""
    try:
        return reader.read(part, place or field)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), reader.type, field) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(field, error, field) from None


def _unreadable(what: str, error: Exception, field: str | None = None) -> InvalidRequest:
    is_deep = isinstance(error, RecursionError)
    why = "nested too deeply" if is_deep else f"not valid JSON: {error}"
    return InvalidRequest(f"{what} is {why}", field=field)


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
            return wrong(excerpt(f"{path}.{match[1]}" if path else match[1]), wording)
    message = excerpt(message, 200)
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    if message.startswith(("Invalid enum value", "Invalid value")):
        choices = ", ".join(_choices_at(expected, own))
        if choices:
            message = f"{message}; expected one of: {choices}"
    return wrong(path, message)


def _choices_at(body: type, path: str) -> Iterator[str]:
    """The values that ``body`` allows at ``path`` (``messages[0].role``); none if all are."""
    place: types.Type | None = types.type_info(body)
    for step in _STEP.findall(path):
        if place is None:
            return
        place = _fields_of(place).get(step, _items_of(place))
    for one in () if place is None else _alternatives(place):
        if isinstance(one, types.EnumType):
            yield from (str(member.value) for member in one.cls)
        elif isinstance(one, types.LiteralType):
            yield from map(str, one.values)


@cache
def with_unknown_fields(kind: Any, *, forbidden: bool) -> Any:
    """``kind`` with unknown fields ``forbidden`` or allowed, also in all inner messages."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is None or origin is Literal or not parts:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return _changed(kind, forbidden)
        return kind
    change = partial(with_unknown_fields, forbidden=forbidden)
    if origin is Annotated:
        return Annotated[(change(parts[0]), *parts[1:])]
    inner = tuple(part if part is ... else change(part) for part in parts)
    if inner == parts:
        return kind
    if origin in (Union, UnionType):
        return reduce(or_, inner)
    return origin[inner]


def _changed(message: type[msgspec.Struct], forbidden: bool) -> type[msgspec.Struct]:
    """A subclass of ``message`` with the new rule. It can replace ``message``."""
    fields = []
    for field in msgspec.structs.fields(message):
        kind = with_unknown_fields(field.type, forbidden=forbidden)
        if kind != field.type:
            made = msgspec.field(  # type: ignore[call-overload]  # one of them is NODEFAULT
                name=field.encode_name, default=field.default, default_factory=field.default_factory
            )
            fields.append((field.name, kind, made))
    now = message.__struct_config__.forbid_unknown_fields
    if getattr(message, "has_fields_of_ours", False):
        forbidden = now
    if not fields and now is forbidden:
        return message
    return msgspec.defstruct(
        message.__name__,
        fields,
        bases=(message,),
        module=message.__module__,
        namespace={"__doc__": message.__doc__},
        forbid_unknown_fields=forbidden,
        kw_only=True,
    )


_MAX_BYTES = 2**20
"""Longest text that is searched; a search takes 20 times its size. Longer texts report one name."""
_MAX_OBJECTS = 1_000
"""Most objects searched, some microseconds each. Clients send the same names in all objects."""


def put_down_unknown(
    text: str | msgspec.Raw, shape: types.Type, place: str, ignored: Ignored
) -> bool:
    """Add the fields of ``text`` that ``shape`` does not have to ``ignored``. ``text`` is at
    ``place`` and was read as that type. Returns whether it has any; long texts are not searched."""
    if (len(text) if isinstance(text, str) else len(memoryview(text))) > _MAX_BYTES:
        return False
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # half a surrogate pair; nested too deeply
        return False
    has_found, left = False, _MAX_OBJECTS

    def look(value: object, shape: types.Type, place: str) -> None:
        nonlocal has_found, left
        if isinstance(value, list) and (items := _items_of(shape)) is not None:
            for inner in value:
                if isinstance(inner, dict | list) and not ignored.has_more:
                    look(inner, items, f"{place}[]")
        if not isinstance(value, dict) or not (known := _fields_of(shape)):
            return
        if not left:
            ignored.has_more = True
            return
        left -= 1
        for name, inner in value.items():
            if name in known:
                look(inner, known[name], f"{place}.{name}" if place else name)
            else:
                has_found = True
                ignored.add(place, name)

    look(whole, shape, place)
    return has_found


def _alternatives(shape: types.Type) -> tuple[types.Type, ...]:
    return shape.types if isinstance(shape, types.UnionType) else (shape,)


def _items_of(shape: types.Type) -> types.Type | None:
    """Type of a list's items; None for other types."""
    for one in _alternatives(shape):
        if isinstance(one, types.ListType | types.VarTupleType):
            return one.item_type
    return None


def _fields_of(shape: types.Type) -> Mapping[str, types.Type]:
    """Types of a message's fields; empty for other types. No union here has two messages."""
    messages = (one.cls for one in _alternatives(shape) if isinstance(one, types.StructType))
    return next(map(_fields_of_message, messages), {})


@cache
def _fields_of_message(message: type) -> Mapping[str, types.Type]:
    info = types.type_info(message)
    assert isinstance(info, types.StructType)
    return {field.encode_name: field.type for field in info.fields}
