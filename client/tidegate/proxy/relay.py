"""Messages between one MCP client and one MCP server, with time limits for calls.

All pass as they are, but for these:

- a call that has a time limit tells the server what is left of it, and ends at it: the server gets
  ``notifications/cancelled``, the client an answer, and what the server still says is dropped;
- a server that dies is started again, told what the client told the one before (``introduction``),
  and calls that it was at are answered; others wait for the new one;
- requests of the server (sampling, roots, elicitation) have ids of ours at the client, since a
  new server counts from one again.
"""

import logging
from collections.abc import AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from tidegate.proxy import answers
from tidegate.proxy.headers import HttpHeaders
from tidegate.proxy.introduction import INITIALIZE, INITIALIZED, Introduction
from tidegate.proxy.limits import CallLimits, TimeLimit

MAX_WAITING: Final = 1024
"""Most messages that wait for a server to read them."""
INTRODUCTION_S: Final = 30.0
"""Seconds that a new server may take to answer the handshake."""
STEADY_S: Final = 60.0
"""Seconds after which a server that dies has not died of its start."""
MAX_PAUSE_S: Final = 30.0
"""Longest pause in seconds before a server that keeps dying is started again."""
LEAVE_S: Final = 1.0
"""Seconds that a server behind a URL has for the end of its session when the client leaves."""
SESSION_TERMINATED: Final = "Session terminated"
"""The HTTP transport's error for a session that the server does not know any more."""

Source = AsyncIterable[SessionMessage | Exception]
logger = logging.getLogger("tidegate.mcp")


class Sink(Protocol):
    """The writing end of a transport."""

    async def send(self, item: SessionMessage, /) -> None: ...


Connect = Callable[[], AbstractAsyncContextManager[tuple[Source, Sink]]]
"""Starts a server or connects to it; leaving the block ends it."""


class NoServer(Exception):
    """The server could not be started."""


@dataclass(eq=False, slots=True)
class _Call:
    """A request of the client that is not answered yet."""

    request: JSONRPCRequest
    limit: TimeLimit | None
    ends_at: float
    timer: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_sent: bool = False


class Relay:
    """A proxy between one client and one server. To be used once."""

    def __init__(self, connect: Connect, limits: CallLimits) -> None:
        self._connect = connect
        self._limits = limits
        self._calls: dict[RequestId, _Call] = {}
        self._asked: dict[RequestId, RequestId] = {}
        """Ids that the server has given its unanswered requests, by those that they have at the
        client."""
        self._numbers = count(1)
        self._introduction = Introduction()
        self._headers = HttpHeaders()
        self._had_server = False
        self._is_over = False
        self._serving = anyio.CancelScope()
        """Around what is done for one server, and around a pause before the next."""
        self._down = ""
        """Why there is no server for the time being; empty while there is or will be at once."""
        self._sink: Sink
        self._tasks: TaskGroup
        self._outbox: MemoryObjectSendStream[JSONRPCMessage]

    async def run(self, source: Source, sink: Sink) -> None:
        """Relay for the client at ``source`` and ``sink`` until it ends its stream; the server has
        ended by then. Raises ``NoServer`` if the first one could not be started."""
        self._sink = sink
        self._outbox, waiting = anyio.create_memory_object_stream[JSONRPCMessage](MAX_WAITING)
        failures: list[NoServer] = []
        async with self._outbox, waiting, anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._keep_a_server, waiting, failures)
            async for item in source:
                await self._from_client(item)
            self._is_over = True
            for request_id in [*self._calls]:
                self._forget(request_id)
            self._serving.cancel()
            self._tasks.cancel_scope.deadline = anyio.current_time() + LEAVE_S
        if failures:
            raise failures[0]

    # ── from the client ──────────────────────────────────────────────────────────────────────

    async def _from_client(self, item: SessionMessage | Exception) -> None:
        if isinstance(item, Exception):
            error = ErrorData(code=PARSE_ERROR, message=f"not a valid JSON-RPC message: {item}")
            await self._answer(JSONRPCError(jsonrpc="2.0", id=None, error=error))
            return
        match item.message:
            case JSONRPCRequest() as request:
                await self._begin(request)
            case JSONRPCNotification() as notification:
                if notification.method != answers.CANCELLED or self._is_cancelled(notification):
                    self._queue(notification)
            case JSONRPCResponse() | JSONRPCError() as answer:
                # Not an answer to a server that died.
                if answer.id is not None and answer.id in self._asked:
                    self._queue(answer.model_copy(update={"id": self._asked.pop(answer.id)}))

    async def _begin(self, request: JSONRPCRequest) -> None:
        try:
            limit = self._limits.of(request.method, answers.params_of(request))
        except ValueError as error:
            await self._answer(_error(request, INVALID_PARAMS, str(error)))
            return
        if self._down:
            await self._answer(answers.failed(request, CONNECTION_CLOSED, self._down))
            return
        if limit is not None and limit.seconds <= 0:
            reason = f"{answers.name_of(request)} was not called: no time was left for it"
            await self._answer(answers.failed(request, REQUEST_TIMEOUT, reason))
            return
        call = _Call(request, limit, anyio.current_time() + (limit.seconds if limit else 0.0))
        if not self._queue(request):
            reason = f"the server has not read {MAX_WAITING} earlier messages"
            await self._answer(answers.failed(request, CONNECTION_CLOSED, reason))
            return
        self._calls[request.id] = call
        if limit is not None:
            self._tasks.start_soon(self._end_when_over, call, limit)

    def _is_cancelled(self, notification: JSONRPCNotification) -> bool:
        """Forget a call that the client wants no more; whether the server is to hear of that."""
        call = self._forget(answers.params_of(notification).get("requestId"))
        return call is None or call.is_sent

    async def _end_when_over(self, call: _Call, limit: TimeLimit) -> None:
        with call.timer:
            await anyio.sleep_until(call.ends_at)
        request = call.request
        if call.timer.cancel_called or self._calls.get(request.id) is not call:
            return
        del self._calls[request.id]
        reason = (
            f"{answers.name_of(request)} was not done within {limit.seconds:.3g} s "
            f"({limit.reason}) and was cancelled"
        )
        if call.is_sent and request.method != INITIALIZE:  # which must not be cancelled
            self._queue(answers.cancellation(request.id, reason))
        await self._answer(answers.failed(request, REQUEST_TIMEOUT, reason))

    def _forget(self, request_id: object) -> _Call | None:
        if not isinstance(request_id, int | str):
            return None
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.timer.cancel()
        return call

    async def _answer(self, message: JSONRPCMessage) -> None:
        await self._sink.send(SessionMessage(message))

    # ── to the server ────────────────────────────────────────────────────────────────────────

    def _queue(self, message: JSONRPCMessage) -> bool:
        """Have the server get ``message`` when it reads; False where too many wait already."""
        try:
            self._outbox.send_nowait(message)
        except anyio.WouldBlock:
            logger.warning("dropped a message: the server has not read %d", MAX_WAITING)
            return False
        return True

    async def _feed(self, waiting: MemoryObjectReceiveStream[JSONRPCMessage], sink: Sink) -> None:
        async for message in waiting:
            if isinstance(message, JSONRPCRequest):
                call = self._calls.get(message.id)
                if call is None or call.request is not message:
                    continue  # its time was over before its turn came, or it was cancelled
                call.is_sent = True
                if call.limit is not None:
                    left_s = call.ends_at - anyio.current_time()
                    message = answers.with_timeout(message, left_s)
            await self._send(message, sink)

    async def _send(self, message: JSONRPCMessage, sink: Sink) -> None:
        await sink.send(SessionMessage(message, self._headers.of(message)))

    # ── from the server ──────────────────────────────────────────────────────────────────────

    async def _from_server(self, item: SessionMessage | Exception) -> None:
        if isinstance(item, Exception):
            logger.warning("the server sent an invalid JSON-RPC message: %s", item)
            return
        match item.message:
            case JSONRPCRequest() as request:
                own = f"tidegate-{next(self._numbers)}"
                self._asked[own] = request.id
                await self._answer(request.model_copy(update={"id": own}))
            case JSONRPCNotification(method=answers.CANCELLED) as notification:
                theirs = answers.params_of(notification).get("requestId")
                for ours in [ours for ours, asked in self._asked.items() if asked == theirs]:
                    del self._asked[ours]
                    await self._answer(answers.renamed(notification, ours))
            case JSONRPCNotification() as notification:
                await self._answer(notification)
            case JSONRPCResponse() | JSONRPCError() as answer:
                if answer.id is None:
                    logger.warning("the server could not read a message: %s", answer)
                call = self._forget(answer.id)
                if call is None:
                    return  # nobody waits for it any more
                if isinstance(answer, JSONRPCResponse):
                    self._headers.learn(call.request, answer)
                    self._introduction.learn(call.request)
                await self._answer(answer)

    # ── servers, one after the other ─────────────────────────────────────────────────────────

    async def _keep_a_server(
        self, waiting: MemoryObjectReceiveStream[JSONRPCMessage], failures: list[NoServer]
    ) -> None:
        deaths = 0
        while not self._is_over:
            began = anyio.current_time()
            self._serving = anyio.CancelScope()
            try:
                reason = await self._serve(waiting)
            except NoServer as error:
                failures.append(error)
                self._tasks.cancel_scope.cancel()
                return
            if self._is_over:
                return
            deaths = 1 if anyio.current_time() - began > STEADY_S else deaths + 1
            pause_s = min(2.0 ** min(deaths - 2, 10), MAX_PAUSE_S) if deaths > 1 else 0.0
            logger.warning("the server ended: %s; started again in %g s", reason, pause_s)
            await self._fail_sent(reason)
            if pause_s:
                self._down = (
                    f"there is no server: {deaths} times in a row it ended soon ({reason}); it is "
                    f"started again {pause_s:g} s after that"
                )
                await self._fail([*self._calls.values()], self._down)
                with anyio.CancelScope() as self._serving:
                    await anyio.sleep(pause_s)
                self._down = ""

    async def _serve(self, waiting: MemoryObjectReceiveStream[JSONRPCMessage]) -> str:
        """Relay to one server until it ends; returns why it did. Raises ``NoServer``."""
        reason = "the client left"
        try:
            async with self._connect() as (source, sink):
                self._had_server = True
                with self._serving:
                    await self._introduce(source, sink)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._feed, waiting, sink)
                        reason = await self._listen(source)
                        tasks.cancel_scope.cancel()
                    # Now: leaving the block waits for a process that has only closed its output.
                    await self._fail_sent(reason)
        except Exception as error:
            if not self._had_server:
                raise NoServer(str(error)) from error
            return _why(error)
        return reason

    async def _listen(self, source: Source) -> str:
        async for item in source:
            await self._from_server(item)
            if _ends_session(item):
                return "it does not know the session any more"
        return "it closed its output"

    async def _introduce(self, source: Source, sink: Sink) -> None:
        """Tell a new server what the client told the one before it. Raises ``OSError``."""
        handshake = self._introduction.handshake
        if handshake is None:
            return
        with anyio.move_on_after(INTRODUCTION_S) as waited:
            own = self._own(handshake)
            await self._send(own, sink)
            await self._wait_for_answer(own, source)
            await self._send(INITIALIZED, sink)
            for request in self._introduction.after_handshake():
                await self._send(self._own(request), sink)
        if waited.cancelled_caught:
            raise ConnectionError(f"it did not answer the handshake within {INTRODUCTION_S:g} s")

    def _own(self, request: JSONRPCRequest) -> JSONRPCRequest:
        """``request`` as one of ours, whose answer the client does not get."""
        return request.model_copy(update={"id": f"tidegate-{next(self._numbers)}"})

    async def _wait_for_answer(self, request: JSONRPCRequest, source: Source) -> None:
        async for item in source:
            message = item.message if isinstance(item, SessionMessage) else None
            if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id != request.id:
                await self._from_server(item)
            elif isinstance(message, JSONRPCError):
                raise ConnectionError(f"it refused the handshake: {message.error.message}")
            else:
                self._headers.learn(request, message)
                return
        raise ConnectionError("it ended before it answered the handshake")

    async def _fail_sent(self, reason: str) -> None:
        """Answer the calls that a server was at when it ended, and take back what it asked."""
        for own in [*self._asked]:
            del self._asked[own]
            await self._answer(answers.cancellation(own, f"the server ended: {reason}"))
        sent = [call for call in self._calls.values() if call.is_sent]
        told = f"the server ended ({reason}) and is started again; what it had begun may be done"
        await self._fail(sent, told)

    async def _fail(self, calls: list[_Call], reason: str) -> None:
        for call in calls:
            self._forget(call.request.id)
            named = f"{answers.name_of(call.request)} was not answered: {reason}"
            await self._answer(answers.failed(call.request, CONNECTION_CLOSED, named))


def _error(request: JSONRPCRequest, code: int, reason: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request.id, error=ErrorData(code=code, message=reason))


def _ends_session(item: SessionMessage | Exception) -> bool:
    return (
        isinstance(item, SessionMessage)
        and isinstance(item.message, JSONRPCError)
        and item.message.error.code == INVALID_REQUEST
        and item.message.error.message == SESSION_TERMINATED
    )


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
