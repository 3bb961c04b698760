"""Message types derived from other message types, for reading or describing them differently."""

from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec


def mapped(kind: Any, change: Callable[[Any], Any]) -> Any:
    """``kind`` with each type in it replaced by ``change`` of that type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is None or origin is Literal or not parts:
        return change(kind)
    if origin is Annotated:
        return Annotated[(mapped(parts[0], change), *parts[1:])]
    inner = tuple(part if part is ... else mapped(part, change) for part in parts)
    if inner == parts:
        return kind
    if origin in (Union, UnionType):
        return Any if Any in inner else reduce(or_, inner)
    return origin[inner]


def redefined(field: msgspec.structs.FieldInfo, kind: Any, default: object) -> Any:
    """A field with a new type, as ``msgspec.defstruct`` takes it: name, type, and the rest."""
    made = (
        msgspec.field(name=field.encode_name, default_factory=field.default_factory)
        if field.default_factory is not msgspec.NODEFAULT
        else msgspec.field(name=field.encode_name, default=default)
    )
    return field.name, kind, made


@cache
def with_unknown_fields(kind: Any, *, forbidden: bool) -> Any:
    """``kind`` with unknown fields ``forbidden`` or allowed in it and in all its inner messages."""
    return mapped(kind, lambda leaf: _changed(leaf, forbidden) if _is_message(leaf) else leaf)


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@cache
def _changed(message: type[msgspec.Struct], forbidden: bool) -> type[msgspec.Struct]:
    """A subclass of ``message`` for the new rule, so that it can be used in its place."""
    if getattr(message, "has_fields_of_ours", False):
        return message
    fields = [
        redefined(field, kind, field.default)
        for field in msgspec.structs.fields(message)
        if (kind := with_unknown_fields(field.type, forbidden=forbidden)) != field.type
    ]
    if not fields and message.__struct_config__.forbid_unknown_fields is forbidden:
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
