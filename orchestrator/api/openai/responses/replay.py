"""A response's events told again, for a client whose stream broke off or that comes later.

Events have the numbers that they had, or would have had, when the response was made. Pieces of one
text come as one delta with the number of the last; its log-probabilities come with the
text's end.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.api.openai.responses.output import Item, ItemKind

_BEGUN: dict[str, object] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
CREATED = ("created", "queued")
"""The events with which a response in the background is created."""
_KINDS = {
    "message": ItemKind.MESSAGE,
    "reasoning": ItemKind.REASONING,
    "function_call": ItemKind.CALL,
}


class Pieces(NamedTuple):
    """How an item's text came."""

    skipped: int
    """Number of events before the item that told of a call which then was none."""
    chars: "array[int]"
    """Length of each piece."""


def pieces_of(items: Iterable[Item]) -> tuple[Pieces, ...]:
    return tuple(Pieces(item.skipped, array("I", map(len, item.texts))) for item in items)


def encoded_event(kind: str, number: int, fields: Mapping[str, object]) -> bytes:
    """One event; ``kind`` is its type without ``response.``."""
    event = f"response.{kind}"
    encoded = msgspec.json.encode({"type": event, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (event.encode(), encoded)


def replay(body: bytes, pieces: Sequence[Pieces], after: int) -> bytes:
    """The events of a response so far, as far as their numbers are above ``after``. ``pieces`` are
    those of each item of its output."""
    response: dict[str, Any] = msgspec.json.decode(body)
    status = response["status"]
    is_whole = status in ("completed", "incomplete")
    told = _Events(after)
    if response["background"]:
        for kind in CREATED:
            told.tell(kind, {"response": response | _BEGUN | {"status": "queued"}})
    else:
        told.tell("created", {"response": response | _BEGUN})
    if status != "queued":
        told.tell("in_progress", {"response": response | _BEGUN})
    for index, (item, own) in enumerate(zip(response["output"], pieces, strict=True)):
        told.number += own.skipped
        _tell_item(told, index, item, own.chars, is_whole)
    if status not in ("queued", "in_progress"):
        told.tell(status if is_whole else "failed", {"response": response})
    return b"".join(told.events)


class _Events:
    """Numbers events, and encodes those above ``after``."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.number = 0
        """Number of the next event."""
        self.events: list[bytes] = []

    def tell(self, kind: str, fields: Mapping[str, object]) -> None:
        if self.number > self.after:
            self.events.append(encoded_event(kind, self.number, fields))
        self.number += 1


def _tell_item(
    told: _Events, index: int, body: Mapping[str, Any], chars: "array[int]", is_whole: bool
) -> None:
    item = Item(_KINDS[body["type"]], index, body["id"])
    item.name, item.call_id = body.get("name", ""), body.get("call_id", "")
    for event in item.opening():
        told.tell(*event)
    part = {"text": body["arguments"]} if item.kind is ItemKind.CALL else body["content"][0]
    item.texts, item.logprobs = [part["text"]], part.get("logprobs", [])
    if chars:
        had = sum(chars[: max(0, told.after + 1 - told.number)])
        told.number += len(chars) - 1
        delta = {**item.place, "delta": part["text"][had:]}
        if item.kind is ItemKind.MESSAGE:
            delta["logprobs"] = []
        told.tell(item.kind.delta, delta)
    item.status = body["status"]
    if is_whole or item.status == "completed":  # else it broke off, or goes on
        for event in item.closing():
            told.tell(*event)
