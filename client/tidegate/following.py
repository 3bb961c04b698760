"""A task's events as they come, across connections that break."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random
from urllib.parse import quote

import aiohttp
import msgspec

from tidegate import _clock
from tidegate.errors import ApiError, ProtocolError, StreamLost
from tidegate.results import EVENT_TYPES, End, Event, Failed
from tidegate.sse import EventTooLarge, ServerSentEvent, SseParser
from tidegate.streams import Position
from tidegate.transport import Call, Transport

_RECONNECT_FIRST_S = 0.1
_RECONNECT_MOST_S = 2.0
_jitter = Random()


class Follower:
    """Reads the events of one task until ``give_up_at``, or until ``patience_s`` after the last
    sign of life, whichever is first. Both are seconds, the former on our clock."""

    def __init__(
        self, transport: Transport, task_id: str, *, give_up_at: float, patience_s: float
    ) -> None:
        self._transport = transport
        self._task_id = task_id
        self._give_up_at = give_up_at
        self._patience_s = patience_s

    async def events(self, position: Position) -> AsyncGenerator[Event, None]:
        """Every event after ``position``, which moves along, once, to the terminal one.

        Raises ``StreamLost``.
        """
        last_sign = _clock.now()
        parser = SseParser(position.last_event_id)
        attempt = 0
        while True:
            hint_s = 0.0
            trouble = "the server ended the stream without a terminal event"
            try:
                parser = SseParser(parser.last_event_id)
                async with (
                    self._transport.open(self._call(parser.last_event_id)) as response,
                    aclosing(_read(response, parser)) as received,
                ):
                    async for event, event_id in received:
                        position.last_event_id = event_id
                        last_sign, attempt = _clock.now(), 0
                        yield event
                        if isinstance(event, End | Failed):
                            return
            except ApiError as error:
                if not error.retryable:
                    raise
                hint_s = error.retry_after_s or 0.0
                trouble = str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            pause = max(hint_s, _pause_s(attempt, parser.retry_ms))
            if _clock.now() + pause > min(last_sign + self._patience_s, self._give_up_at):
                raise StreamLost(
                    self._task_id, f"lost the events of task {self._task_id}: {trouble}"
                )
            await _clock.sleep(pause)
            attempt += 1

    def _call(self, last_event_id: str) -> Call:
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        return Call(
            "GET",
            f"/v2/tasks/{quote(self._task_id, safe='')}/events",
            headers=headers,
            patience_s=max(self._give_up_at - _clock.now(), 0.001),
        )


def _pause_s(attempt: int, retry_ms: int | None) -> float:
    first = _RECONNECT_FIRST_S if retry_ms is None else retry_ms / 1000
    return min(first * 2.0**attempt, _RECONNECT_MOST_S) * _jitter.uniform(0.5, 1.0)


async def _read(
    response: aiohttp.ClientResponse, parser: SseParser
) -> AsyncGenerator[tuple[Event, str], None]:
    """Events with their ids."""
    if response.content_type != "text/event-stream":
        raise ProtocolError(f"{response.url} answered with {response.content_type}, not events")
    async for chunk in response.content.iter_any():
        try:
            received = parser.feed(chunk)
        except EventTooLarge as error:
            raise ProtocolError(str(error)) from error
        for event in received:
            typed = _typed(event)
            if typed is not None:
                yield typed, event.last_event_id


def _typed(event: ServerSentEvent) -> Event | None:
    """The event as its type; None for a name that this client does not know."""
    event_type = EVENT_TYPES.get(event.event)
    if event_type is None:
        return None
    try:
        return msgspec.json.decode(event.data, type=event_type)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"event {event.event!r} has an unexpected body: {error}") from error
