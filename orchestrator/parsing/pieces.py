"""The pieces of a model's output, in the order in which it writes them."""

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's thinking, without the tags around it."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    """A tool is called. ``index`` counts the calls of an answer, from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: joined they are a JSON object, as the model wrote it."""

    index: int
    json: str


class CallEnds(msgspec.Struct, frozen=True, gc=False):
    """A call is complete, its arguments a JSON object."""

    index: int


class CallFails(msgspec.Struct, frozen=True, gc=False):
    """A call that has begun turns out not to be one: ``text`` is its whole text. ``is_cut`` if a
    limit of the answer cut it: its arguments are the beginning of a JSON object."""

    index: int
    text: str
    is_cut: bool = False


Piece = Reasoning | Content | CallBegins | CallArguments | CallEnds | CallFails
