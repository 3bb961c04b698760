"""Event streams of tasks and clips, which reconnect after a broken connection."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from tidegate import _clock
from tidegate.deadlines import Deadline, due
from tidegate.errors import (
    ApiError,
    ConnectFailed,
    NotFound,
    ProtocolError,
    StreamLost,
    TidegateError,
    error_class,
)
from tidegate.sse import SseParser, received
from tidegate.transport import AFTER_DEADLINE_S, LONGEST_TASK_S, HttpCall, Transport, jitter

_RECONNECT_FIRST_S = 0.1
_RECONNECT_MAX_S = 2.0
_CANCEL_WAIT_S = 2.0

_R = TypeVar("_R")
_S = TypeVar("_S")
_T = TypeVar("_T")


class Stream(Generic[_T]):
    """A stream to iterate over. Use ``async with`` if the loop may end early::

        async with client.stream("Once upon a time") as events:
            async for event in events:
                ...

    Three things also cancel the work on the server: leaving the block, ``aclose()``, and cancelling
    the coroutine that reads the stream.
    """

    def __init__(
        self, events: AsyncGenerator[tuple[_T, str], None], last_event_id: str = ""
    ) -> None:
        """``events`` are the items, each with its id."""
        self._events = events
        self.last_event_id = last_event_id
        """Id of the last event read. ``Client.events`` can continue after it, even in another
        program. Empty before the first event, and for chats."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        event, self.last_event_id = await anext(self._events)
        return event

    async def aclose(self) -> None:
        """Stop reading, and cancel the work."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FollowedWork(Generic[_S, _T]):
    """Work that a service accepts (with answer ``_S``), and its events (``_T``) up to the last."""

    _kind: str
    _path: str
    _submitted: type[_S]
    _types: Mapping[str, type[_T]]
    _ended: type[Any]
    """Type of the last event of work that succeeded."""
    _failed: type[Any]

    def __init__(self, transport: Transport, reconnect_for_s: float) -> None:
        self._transport = transport
        self._reconnect_for_s = reconnect_for_s

    async def cancel(self, id: str, /) -> None:
        """Cancel the work. Idempotent. Returns once the server has accepted it; the work ends
        within one step. Sent even if a block's deadline has passed.
        """
        await self._transport.send(HttpCall("POST", f"{self._path_of(id)}/cancel"))

    def events(
        self, id: str, /, *, last_event_id: str = "", deadline: Deadline | None = None
    ) -> Stream[_T]:
        """Events of the work, from the beginning or after ``last_event_id``, to the terminal one.

        A broken connection is reopened at the same position, without a lost or repeated event,
        until ``deadline`` (or ``reconnect_for`` after the last sign of life). Then ``StreamLost``
        is raised. Work that failed yields its event and raises nothing.
        """
        return Stream(self._events(id, due(deadline).at, last_event_id), last_event_id)

    def _stream(self, submission: HttpCall) -> Stream[_T]:
        return Stream(self._owned(submission))

    async def _owned(self, submission: HttpCall) -> AsyncGenerator[tuple[_T, str], None]:
        """Submit work and yield its events. Closing it before the last one cancels the work."""

        async def stop() -> None:
            """Try to cancel the work, for at most ``_CANCEL_WAIT_S``."""
            with suppress(TidegateError, TimeoutError):
                async with asyncio.timeout(_CANCEL_WAIT_S):
                    await self.cancel(self._id(await submitting))

        submitting = asyncio.ensure_future(self._transport.call(submission, self._submitted))
        try:
            id = self._id(await asyncio.shield(submitting))
        except asyncio.CancelledError:
            await stop()  # the server may have accepted it
            raise
        ended = False
        try:
            async with aclosing(self._events(id, submission.ends_at, is_known=True)) as received:
                async for event, event_id in received:
                    ended = isinstance(event, self._ended | self._failed)
                    if isinstance(event, self._failed):
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

    def _id(self, work: _S) -> str:
        return str(getattr(work, f"{self._kind}_id"))

    def _path_of(self, id: str) -> str:
        return f"{self._path}/{quote(id, safe='')}"

    async def _list(self, result: type[_R], status: str | None, limit: int) -> _R:
        chosen = "" if status is None else f"&status={quote(status)}"
        return await self._transport.get(f"{self._path}?limit={limit}{chosen}", result)

    async def _events(
        self, id: str, ends_at: float | None, last_event_id: str = "", *, is_known: bool = False
    ) -> AsyncGenerator[tuple[_T, str], None]:
        """Yield every event after ``last_event_id`` once, with its id, up to the terminal one.
        Stops shortly after ``ends_at`` on our clock, or ``reconnect_for`` after the last sign of
        life. ``is_known``: the service has accepted this work.

        Raises ``StreamLost``, or ``NotFound`` for work that the service has never accepted.
        """

        def lost(why: str) -> StreamLost:
            return StreamLost(id, f"lost the events of {self._kind} {id}: {why}")

        last_sign = _clock.now()
        give_up_at = AFTER_DEADLINE_S + (last_sign + LONGEST_TASK_S if ends_at is None else ends_at)
        patience_s = self._reconnect_for_s if ends_at is None else float("inf")
        attempt = 0
        while True:
            hint_s = 0.0
            reason = "the server ended the stream without a terminal event"
            parser = SseParser(last_event_id)
            headers = {"Accept": "text/event-stream"}
            if last_event_id:
                headers["Last-Event-ID"] = last_event_id
            left_s = max(give_up_at - _clock.now(), 0.001)
            path = f"{self._path_of(id)}/events"
            call = HttpCall("GET", path, headers=headers, patience_s=left_s)
            try:
                async with (
                    self._transport.open(call) as response,
                    aclosing(self._read(response, parser)) as events,
                ):
                    is_known = True
                    async for event, last_event_id in events:
                        last_sign, attempt = _clock.now(), 0
                        yield event, last_event_id
                        if isinstance(event, self._ended | self._failed):
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

    async def _read(
        self, response: aiohttp.ClientResponse, parser: SseParser
    ) -> AsyncGenerator[tuple[_T, str], None]:
        """Events that ``response`` brings, each with its id. Raises ``ProtocolError``."""
        if response.content_type != "text/event-stream":
            raise ProtocolError(f"{response.url} answered with {response.content_type}, not events")
        async for event in received(response.content.iter_any(), parser):
            if (event_type := self._types.get(event.event)) is None:
                continue  # a name that this client does not know
            try:
                typed = msgspec.json.decode(event.data, type=event_type)
            except msgspec.DecodeError as error:
                raise ProtocolError(
                    f"event {event.event!r} has an unexpected body: {error}"
                ) from error
            yield typed, event.last_event_id
