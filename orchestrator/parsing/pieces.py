"""The pieces of a model's output, in output order."""

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's thinking, without the tags around it."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    """The start of a tool call. ``index`` counts the calls of an answer from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments. All of them joined are the model's JSON object."""

    index: int
    json: str


class CallEnds(msgspec.Struct, frozen=True, gc=False):
    """The end of a complete call. Its arguments are a JSON object."""

    index: int


class CallFails(msgspec.Struct, frozen=True, gc=False):
    """A call that began is not a call. ``text`` is its whole text. ``is_cut``: a limit of the
    answer cut it, and its arguments are the start of a JSON object."""

    index: int
    text: str
    is_cut: bool = False


Piece = Reasoning | Content | CallBegins | CallArguments | CallEnds | CallFails
