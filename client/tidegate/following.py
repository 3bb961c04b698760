"""A task's event stream, which reconnects after a broken connection."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Self
from urllib.parse import quote

import aiohttp
import msgspec

from tidegate import _clock
from tidegate.errors import (
    ApiError,
    ConnectFailed,
    NotFound,
    ProtocolError,
    StreamLost,
    TidegateError,
    error_class,
)
from tidegate.results import EVENT_TYPES, End, Event, Failed, Submitted
from tidegate.sse import SseParser
from tidegate.transport import AFTER_DEADLINE_S, LONGEST_TASK_S, HttpCall, Transport, jitter

_RECONNECT_FIRST_S = 0.1
_RECONNECT_MAX_S = 2.0
_CANCEL_WAIT_S = 2.0

Events = AsyncGenerator[tuple[Event, str], None]
"""Events, each with its id."""


class Stream:
    """A stream to iterate over. Use ``async with`` if the loop may end early::

        async with client.stream("Once upon a time") as events:
            async for event in events:
                ...

    Three things also cancel the work on the server: leaving the block, ``aclose()``, and cancelling
    the coroutine that reads the stream.
    """

    def __init__(self, events: Events, last_event_id: str = "") -> None:
        self._events = events
        self.last_event_id = last_event_id
        """Id of the last event read. ``Client.events`` can continue after it, even in another
        program. Empty before the first event."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event, self.last_event_id = await anext(self._events)
        return event

    async def aclose(self) -> None:
        """Stop reading, and cancel the work."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def path_of(task_id: str) -> str:
    return f"/v2/tasks/{quote(task_id, safe='')}"


async def cancel(transport: Transport, task_id: str) -> None:
    await transport.send(HttpCall("POST", f"{path_of(task_id)}/cancel"))


async def submit_and_follow(
    transport: Transport, submission: HttpCall, reconnect_for_s: float
) -> Events:
    """Submit a task and yield its events. Closing it before the last one cancels the task."""

    async def stop() -> None:
        """Try to cancel the task, for at most ``_CANCEL_WAIT_S``."""
        with suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(_CANCEL_WAIT_S):
                await cancel(transport, (await submitting).task_id)

    submitting = asyncio.ensure_future(transport.call(submission, Submitted))
    try:
        id = (await asyncio.shield(submitting)).task_id
    except asyncio.CancelledError:
        await stop()  # the server may have accepted it
        raise
    ended = False
    events = follow(transport, id, submission.ends_at, reconnect_for_s, is_known=True)
    try:
        async with aclosing(events) as received:
            async for event, event_id in received:
                ended = isinstance(event, End | Failed)
                if isinstance(event, Failed):
                    raise error_class(event.code, None)(
                        event.message,
                        code=event.code,
                        retryable=event.retryable,
                        task_id=id,
                        details=msgspec.structs.asdict(event),
                    )
                yield event, event_id
    finally:
        if not ended:
            await stop()


async def follow(
    transport: Transport,
    task_id: str,
    ends_at: float | None,
    reconnect_for_s: float,
    last_event_id: str = "",
    *,
    is_known: bool = False,
) -> Events:
    """Yield every event of a task after ``last_event_id`` once, up to the terminal one. Stops
    shortly after ``ends_at`` on our clock, or without it ``reconnect_for_s`` after the last sign of
    life. ``is_known``: the service has accepted this task.

    Raises ``StreamLost``, or ``NotFound`` for a task that the service has never accepted.
    """

    def lost(why: str) -> StreamLost:
        return StreamLost(task_id, f"lost the events of task {task_id}: {why}")

    last_sign = _clock.now()
    give_up_at = AFTER_DEADLINE_S + (last_sign + LONGEST_TASK_S if ends_at is None else ends_at)
    patience_s = reconnect_for_s if ends_at is None else float("inf")
    attempt = 0
    while True:
        hint_s = 0.0
        reason = "the server ended the stream without a terminal event"
        parser = SseParser(last_event_id)
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        left_s = max(give_up_at - _clock.now(), 0.001)
        call = HttpCall("GET", f"{path_of(task_id)}/events", headers=headers, patience_s=left_s)
        try:
            async with (
                transport.open(call) as response,
                aclosing(_read(response, parser)) as events,
            ):
                is_known = True
                async for event, last_event_id in events:
                    last_sign, attempt = _clock.now(), 0
                    yield event, last_event_id
                    if isinstance(event, End | Failed):
                        return
        except NotFound as error:
            if not is_known:
                raise
            raise lost(
                "the service no longer has it; a restarted service continues only durable tasks"
            ) from error
        except ApiError as error:
            if not error.retryable:
                raise
            hint_s, reason = error.retry_after_s or 0.0, str(error)
        except ConnectFailed as error:
            reason = str(error)
        last_event_id = parser.last_event_id  # an unknown event has one, too
        first_s = _RECONNECT_FIRST_S if parser.retry_ms is None else parser.retry_ms / 1000
        pause_s = min(first_s * 2.0**attempt, _RECONNECT_MAX_S) * jitter.uniform(0.5, 1.0)
        pause_s = max(hint_s, pause_s)
        if _clock.now() + pause_s > min(last_sign + patience_s, give_up_at):
            raise lost(reason)
        await _clock.sleep(pause_s)
        attempt += 1


async def _read(response: aiohttp.ClientResponse, parser: SseParser) -> Events:
    """Events that ``response`` brings. Raises ``ProtocolError``."""
    if response.content_type != "text/event-stream":
        raise ProtocolError(f"{response.url} answered with {response.content_type}, not events")
    async for chunk in response.content.iter_any():
        for event in parser.feed(chunk):
            if (event_type := EVENT_TYPES.get(event.event)) is None:
                continue  # a name that this client does not know
            try:
                typed = msgspec.json.decode(event.data, type=event_type)
            except msgspec.DecodeError as error:
                raise ProtocolError(
                    f"event {event.event!r} has an unexpected body: {error}"
                ) from error
            yield typed, event.last_event_id
