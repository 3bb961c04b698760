"""Clips for plain code: what ``SyncClient.slots`` offers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, Unpack

from tidegate.deadlines import Deadline
from tidegate.slots import (
    Recipe,
    SlotEvent,
    SlotList,
    SlotOptions,
    SlotResult,
    Slots,
    SlotStatus,
    SlotSubmitted,
)
from tidegate.streams import Stream
from tidegate.sync_sessions import Runs

if TYPE_CHECKING:
    from tidegate.sync import SyncStream

_T = TypeVar("_T")


class OpensStreams(Protocol):
    """Whatever turns an asynchronous stream into one that plain code can iterate over."""

    def __call__(self, open_stream: Callable[[], Stream[_T]]) -> "SyncStream[_T]": ...


class SyncSlots:
    """``Slots`` for plain code."""

    def __init__(self, loop: Runs, slots: Slots, open_stream: OpensStreams) -> None:
        self._loop = loop
        self._slots = slots
        self._open = open_stream

    def create(
        self,
        recipe: Recipe,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[SlotOptions],
    ) -> SlotSubmitted:
        """Hand in a recipe and return at once. Raises ``ApiError`` if refused
        (``Slots.create``)."""
        return self._loop.run(
            lambda: self._slots.create(recipe, idempotency_key=idempotency_key, **options)
        )

    def get(self, slot_id: str) -> SlotStatus:
        """Get a slot as it stands. Raises ``NotFound`` (``Slots.get``)."""
        return self._loop.run(lambda: self._slots.get(slot_id))

    def list(self, *, status: str | None = None, limit: int = 100) -> SlotList:
        """List the slots of this client's key, newest first (``Slots.list``)."""
        return self._loop.run(lambda: self._slots.list(status=status, limit=limit))

    def cancel(self, slot_id: str) -> None:
        """Stop a slot. Idempotent (``Slots.cancel``)."""
        self._loop.run(lambda: self._slots.cancel(slot_id))

    def download(self, slot_id: str, output: str = "mp4") -> bytes:
        """Get a file of a slot: ``mp4``, ``wav`` or ``png``. Raises ``NotFound``
        (``Slots.download``)."""
        return self._loop.run(lambda: self._slots.download(slot_id, output))

    def events(
        self, slot_id: str, *, last_event_id: str = "", deadline: Deadline | None = None
    ) -> "SyncStream[SlotEvent]":
        """Events of a slot, from the beginning or after ``last_event_id`` (``Slots.events``)."""
        return self._open(
            lambda: self._slots.events(slot_id, last_event_id=last_event_id, deadline=deadline)
        )

    def stream(self, recipe: Recipe, **options: Unpack[SlotOptions]) -> "SyncStream[SlotEvent]":
        """Hand in a recipe and yield its events (``Slots.stream``)."""
        return self._open(lambda: self._slots.stream(recipe, **options))

    def render(self, recipe: Recipe, **options: Unpack[SlotOptions]) -> SlotResult:
        """Hand in a recipe and wait for the clip (``Slots.render``)."""
        return self._loop.run(lambda: self._slots.render(recipe, **options))
