"""``SyncClient.slots``."""

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
    """Makes a stream whose events plain code can wait for."""

    def __call__(self, open_stream: Callable[[], Stream[_T]]) -> "SyncStream[_T]": ...


class SyncSlots:
    """As ``Slots``."""

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
        """As ``Slots.create``."""
        return self._loop.run(
            lambda: self._slots.create(recipe, idempotency_key=idempotency_key, **options)
        )

    def get(self, slot_id: str) -> SlotStatus:
        """As ``Slots.get``."""
        return self._loop.run(lambda: self._slots.get(slot_id))

    def list(self, *, status: str | None = None, limit: int = 100) -> SlotList:
        """As ``Slots.list``."""
        return self._loop.run(lambda: self._slots.list(status=status, limit=limit))

    def cancel(self, slot_id: str) -> None:
        """As ``Slots.cancel``."""
        self._loop.run(lambda: self._slots.cancel(slot_id))

    def download(self, slot_id: str, output: str = "mp4") -> bytes:
        """As ``Slots.download``."""
        return self._loop.run(lambda: self._slots.download(slot_id, output))

    def events(
        self, slot_id: str, *, last_event_id: str = "", deadline: Deadline | None = None
    ) -> "SyncStream[SlotEvent]":
        """As ``Slots.events``."""
        return self._open(
            lambda: self._slots.events(slot_id, last_event_id=last_event_id, deadline=deadline)
        )

    def stream(self, recipe: Recipe, **options: Unpack[SlotOptions]) -> "SyncStream[SlotEvent]":
        """As ``Slots.stream``."""
        return self._open(lambda: self._slots.stream(recipe, **options))

    def render(self, recipe: Recipe, **options: Unpack[SlotOptions]) -> SlotResult:
        """As ``Slots.render``."""
        return self._loop.run(lambda: self._slots.render(recipe, **options))
