"""Finds the names of fields in a JSON text that its type lacks, with their places.

The text is parsed along its type only: the content of unknown fields, and of what the type leaves
raw, is not examined.
"""

from functools import cache

import msgspec
import msgspec.inspect as types

from orchestrator.api.http.ignored import Ignored

_MAX_BYTES = 2**20
"""Longest text that is searched; parsing it takes some twenty times its size. For longer ones only
one name is reported."""
_MAX_OBJECTS = 1_000
"""Most objects that are parsed, at some microseconds each: clients send the same names in all of
them."""
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_arrays = msgspec.json.Decoder(list[msgspec.Raw])
_raw = msgspec.json.Decoder(msgspec.Raw)


def put_down_unknown(
    text: str | msgspec.Raw, shape: types.Type, place: str, ignored: Ignored
) -> bool:
    """Add to ``ignored`` the fields that ``shape`` lacks in ``text``, which stands at ``place`` of
    a body and has already been read as that type. Returns whether any was found; a long text is not
    searched."""
    length = len(text) if isinstance(text, str) else len(memoryview(text))
    if length > _MAX_BYTES:
        return False
    search = _Search(ignored)
    try:
        search.look(_raw.decode(text), shape, place)
    except msgspec.DecodeError:  # a name that is not valid text, such as half a surrogate pair
        return False
    return search.has_found


class _Search:
    def __init__(self, ignored: Ignored) -> None:
        self.has_found = False
        """Whether there was an unknown field, be it one that had been named before."""
        self._ignored = ignored
        self._left = _MAX_OBJECTS

    def look(self, value: msgspec.Raw, shape: types.Type, place: str) -> None:
        """Search ``value``, which has that shape."""
        first = bytes(memoryview(value)[:1])
        if first == b"{":
            self._object(value, shape, place)
        elif first == b"[" and (items := _items_of(shape)) is not None:
            for inner in _arrays.decode(value):
                self.look(inner, items, f"{place}[]")

    def _object(self, value: msgspec.Raw, shape: types.Type, place: str) -> None:
        if self._left <= 0:
            self._ignored.has_more = True
        if self._ignored.has_more:
            return
        self._left -= 1
        stated = _objects.decode(value)
        message = _message_of(shape, stated)
        if message is None:
            return
        known = _fields_of(message.cls)
        for name, inner in stated.items():
            if name not in known:
                if name != message.tag_field:
                    self.has_found = True
                    self._ignored.add(place, name)
            elif (field := known[name]) is not None:
                self.look(inner, field, f"{place}.{name}" if place else name)


def _alternatives(shape: types.Type) -> tuple[types.Type, ...]:
    return shape.types if isinstance(shape, types.UnionType) else (shape,)


def _items_of(shape: types.Type) -> types.Type | None:
    """Type of a list's items, if they may be messages; else None."""
    for one in _alternatives(shape):
        if isinstance(one, types.ListType | types.VarTupleType) and _has_messages(one):
            return one.item_type
    return None


def _message_of(shape: types.Type, stated: dict[str, msgspec.Raw]) -> types.StructType | None:
    """The message type of an object; if several are possible, its tag decides. None where none
    fits."""
    messages = [one for one in _alternatives(shape) if isinstance(one, types.StructType)]
    if len(messages) < 2:
        return messages[0] if messages else None
    for one in messages:
        tag = stated.get(one.tag_field or "")
        if tag is not None and msgspec.json.decode(tag) == one.tag:
            return one
    return None


@cache
def _fields_of(message: type) -> dict[str, types.Type | None]:
    """Type of each field, by name; None for one that holds no messages to search."""
    info = types.type_info(message)
    assert isinstance(info, types.StructType)
    return {
        field.encode_name: field.type if _has_messages(field.type) else None
        for field in info.fields
    }


def _has_messages(shape: types.Type) -> bool:
    for one in _alternatives(shape):
        if isinstance(one, types.StructType):
            return True
        if isinstance(one, types.ListType | types.VarTupleType) and _has_messages(one.item_type):
            return True
    return False
