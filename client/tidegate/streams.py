"""Streams of events: iterators over a task's or slot's events, or a chat's pieces."""

from collections.abc import AsyncGenerator
from typing import Generic, Self, TypeVar

_T = TypeVar("_T")


class Position:
    """How far a stream has been read: the id of the last event."""

    def __init__(self, last_event_id: str = "") -> None:
        self.last_event_id = last_event_id


class Stream(Generic[_T]):
    """A stream to iterate over, within ``async with`` where the loop may be left early::

        async with client.stream("Once upon a time") as events:
            async for event in events:
                ...

    Leaving the block, ``aclose()`` and cancelling the coroutine that reads it cancel the work on
    the server, too.
    """

    def __init__(self, events: AsyncGenerator[_T, None], position: Position | None = None) -> None:
        self._events = events
        self._position = position or Position()

    @property
    def last_event_id(self) -> str:
        """Id of the last event read here: ``Client.events`` goes on after it, in another program
        too. Empty before the first event, and for chats."""
        return self._position.last_event_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Stop reading; work that nobody reads is cancelled."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
