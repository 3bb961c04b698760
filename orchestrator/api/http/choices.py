"""What may stand at a place in a body where only certain values may, so that errors can list it."""

import re
from collections.abc import Iterator

import msgspec.inspect as types

_STEP = re.compile(r"[^.\[\]]+")


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
