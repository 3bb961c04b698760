"""Forwards requests to the orchestrator that holds their object. The shared state knows the holder
of an id that is unknown here. The request is forwarded with the client's headers and key. If the
client hangs up, the forwarded request ends too. A stalled holder must not stall it (OR-27)::

    before its answer begins ─▶ the request's deadline passes ─▶ 504
                             ─▶ its lease ends ─▶ the new holder is asked, which may be this one
                             ─▶ an event stream has its headers within a second from here (OR-23)
    within its answer        ─▶ keep-alives of an event stream are sent from here
                             ─▶ the deadline passes ─▶ the stream ends with an error
                             ─▶ its lease ends ─▶ the answer is cut: its client may resume it
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.deadlines import stated_deadline
from orchestrator.api.http.event_stream import HEADERS_WITHIN_S, KEEP_ALIVE, SSE_HEADERS
from orchestrator.api.http.finding import Elsewhere
from orchestrator.errors import DeadlineExceeded, Gone, NotReady, TidegateError
from orchestrator.state.members import Holder
from orchestrator.state.shared_state import SharedState
from orchestrator.tasks.deadline import Deadline

FORWARDED_HEADER = "x-tidegate-forwarded"
"""Marks a request from another orchestrator; it is not forwarded again. The value is the tag of the
receiving orchestrator."""
CONNECT_S = 2.0
LATE_S = 0.25
"""Seconds after a deadline to wait for the holder's own error response."""
MOST_LEASES = 2.0
"""Longest wait without a deadline, in leases, for the start of an answer or for a takeover. In this
time a lease ends, this is detected, and others take the tasks, unless the store is unavailable."""
LOOK_S = 0.1
"""Seconds between two checks for a new owner."""
_BROKEN_OFF = "the other orchestrator's response ended early"
_NO_ANSWER = "the orchestrator that has this does not answer; retry in a moment"
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


class Forwarding(Elsewhere):
    """Forwards requests. Its connections are closed with the application."""

    keeps_bodies = True

    def __init__(self, shared_state: SharedState) -> None:
        self._shared_state = shared_state
        self._patience_s = MOST_LEASES * shared_state.config.lease_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request, error: TidegateError) -> web.StreamResponse | None:
        """The answer of the owner of the id that ``error`` reports as unknown; None without an
        owner, and ``error`` then says why. Raises ``NotReady`` before a takeover or if the holder
        does not answer, and ``NoCapacity`` if there is no room for the item."""
        if not error.item_id:
            return None
        asked_for = request.headers.get(FORWARDED_HEADER)
        if asked_for:
            was_here = asked_for != self._shared_state.tasks.tag
            if was_here or await self._shared_state.is_living(error.item_id):
                raise NotReady(
                    "another orchestrator has this now, or takes it on: ask again in a moment"
                )
            return None
        state, front = self._shared_state, _Front(request)
        try:
            find = partial(state.holder_of, error.item_id)
            answer = await self._answer_of(request, find, front)
            if answer is None and state.is_of_dead(error.item_id):
                error.message += (
                    "; the orchestrator that made this id is gone, and nothing was kept of it: "
                    "start again"
                )
                if "task_id" in request.match_info:
                    raise Gone(error.message)
            if answer is None and front.has_begun:
                raise error
        except TidegateError as failure:
            if not front.has_begun:
                raise
            return await front.fail(failure)
        finally:
            await front.stop()
        return answer

    async def _answer_of(
        self,
        request: web.Request,
        find: Callable[[], Awaitable[Holder | None]],
        front: "_Front",
    ) -> web.StreamResponse | None:
        """The answer of the process that ``find`` returns; if that process is lost, of the next one
        that ``find`` returns. None if there is none. Raises the errors of ``find``, ``NotReady``
        and ``DeadlineExceeded``."""
        context, now = request[CONTEXT], asyncio.get_running_loop().time
        if context.deadline is None:
            policy = request.app[ORCHESTRATOR].deadlines
            context.deadline = stated_deadline(request.headers, context.arrival, policy)
        deadline, look_until = context.deadline, 0.0
        while True:
            if deadline is not None and look_until and now() >= deadline.at:
                raise _late(deadline)
            try:
                holder = await find()
                if holder is None:
                    return None
                return await self._forward(request, holder, front, is_first=not look_until)
            except NotReady as not_ready:
                if isinstance(not_ready, _Lost):
                    look_until = look_until or now() + self._patience_s
                if now() >= look_until:
                    raise
                await asyncio.sleep(LOOK_S)

    async def _forward(
        self, request: web.Request, holder: Holder, front: "_Front | None", *, is_first: bool
    ) -> web.StreamResponse:
        """The answer of another orchestrator. Raises ``_Lost``, ``NotReady`` and
        ``DeadlineExceeded``."""
        self._shared_state.forwarded += 1
        context, now = request[CONTEXT], asyncio.get_running_loop().time
        headers, deadline = _handed_on(request, holder.tag), context.deadline
        data = context.body
        is_passed_on = data is None and request.can_read_body
        if deadline is not None and not is_first:  # the next process must not restart the clock
            headers["X-Timeout-Ms"] = f"{max(1.0, 1000 * (deadline.at - now())):.0f}"
        answer_by = now() + self._patience_s if deadline is None else deadline.at + LATE_S
        is_over = False

        def lease_ended() -> None:
            nonlocal is_over
            if not limit.expired():
                is_over = True
                limit.reschedule(now())

        try:
            async with asyncio.timeout_at(None if is_passed_on else answer_by) as limit:
                with self._shared_state.members.watched(holder.url, lease_ended):
                    reply = await self._client().request(
                        request.method,
                        f"{holder.url}{request.raw_path}",
                        headers=headers,
                        data=request.content if is_passed_on else data,
                        allow_redirects=False,
                    )
                    async with reply:
                        limit.reschedule(None)
                        return await self._relay(request, reply, front)
        except aiohttp.ClientConnectionError as failure:
            if context.is_forwarded:  # the client's own connection
                raise
            raise (NotReady if is_passed_on else _Lost)(_NO_ANSWER) from failure
        except TimeoutError:
            if context.is_forwarded:
                raise ConnectionResetError(_BROKEN_OFF) from None
            if deadline is not None and not is_over:
                raise _late(deadline) from None
            raise (_Lost if is_over and not is_passed_on else NotReady)(_NO_ANSWER) from None

    async def _relay(
        self, request: web.Request, reply: aiohttp.ClientResponse, front: "_Front | None"
    ) -> web.StreamResponse:
        """Write another orchestrator's response as it arrives. Raises ``ConnectionResetError`` if
        it is aborted."""
        context, now = request[CONTEXT], asyncio.get_running_loop().time
        is_stream = reply.content_type == "text/event-stream"
        keepalive_s = request.app[CONFIG].keepalive_s if is_stream else 0.0
        begun = None if front is None else await front.stop()
        context.is_forwarded = True
        if begun is not None and not (is_stream and reply.status == 200):
            return await _end_with(begun, await reply.read())
        response = begun or web.StreamResponse(
            status=reply.status, headers=_end_to_end(reply.headers)
        )
        if begun is None:
            await response.prepare(request)
        deadline = context.deadline if request.method == "POST" else None
        rest = b""
        """The start of an incomplete event. Events are written whole, so that comments and errors
        can be written between them."""
        while True:
            due_at = math.inf if deadline is None else max(deadline.at, now()) + LATE_S
            look_at = now() + keepalive_s if keepalive_s else math.inf
            wakes_at = min(due_at, look_at)
            try:
                async with asyncio.timeout_at(wakes_at if wakes_at < math.inf else None):
                    piece = await reply.content.readany()
            except aiohttp.ClientError as failure:
                raise ConnectionResetError(_BROKEN_OFF) from failure
            except TimeoutError:
                if now() < due_at:
                    await response.write(KEEP_ALIVE)
                    continue
                if deadline is None or not is_stream:
                    raise ConnectionResetError(_BROKEN_OFF) from None
                error = context.dialect.error_body(_late(deadline), context.answer_id)
                return await _end_with(response, msgspec.json.encode(error))
            if not piece:
                await response.write(rest)
                await response.write_eof()
                return response
            if is_stream:
                whole, end, rest = (rest + piece).rpartition(b"\n\n")
                piece = whole + end
            await response.write(piece)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Only the deadline limits the duration of an answer.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def _end_with(response: web.StreamResponse, error: bytes) -> web.StreamResponse:
    await response.write(b"event: error\ndata: %b\n\n" % error.replace(b"\n", b" "))
    await response.write_eof()
    return response


class _Front:
    """The client's side of an event stream while its holder has not answered. It sends headers
    after one second and then keep-alives (OR-23)."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._waiting: asyncio.Task[None] | None = None
        follows = request.path.endswith("/events") or request.query.get("stream") == "true"
        if request.method == "GET" and follows:
            self._waiting = asyncio.create_task(self._wait())

    @property
    def has_begun(self) -> bool:
        """Whether the headers are sent, so that an error can only be an event."""
        return self._response is not None

    async def stop(self) -> web.StreamResponse | None:
        """Stop writing to the stream. Returns the response if it has begun."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        return self._response

    async def fail(self, error: TidegateError) -> web.StreamResponse:
        response, context = await self.stop(), self._request[CONTEXT]
        assert response is not None
        body = context.dialect.error_body(error, context.answer_id)
        return await _end_with(response, msgspec.json.encode(body))

    async def _wait(self) -> None:
        await asyncio.sleep(HEADERS_WITHIN_S)
        self._response = response = web.StreamResponse(headers=SSE_HEADERS)
        with suppress(ConnectionError):  # the client is gone; its handler detects this too
            await response.prepare(self._request)
            while True:
                await response.write(KEEP_ALIVE)
                await asyncio.sleep(self._request.app[CONFIG].keepalive_s or math.inf)


class _Lost(NotReady):
    """The process or its lease was lost before its answer began. Its successor can be asked."""


def _late(deadline: Deadline) -> DeadlineExceeded:
    late_s = asyncio.get_running_loop().time() - deadline.at
    return DeadlineExceeded.before("the orchestrator that has this answered", late_s)


def _handed_on(request: web.Request, tag: str) -> "CIMultiDict[str]":
    headers = _end_to_end(request.headers)
    headers[FORWARDED_HEADER] = tag
    headers.setdefault("X-Correlation-Id", request[CONTEXT].correlation_id)
    return headers


def _end_to_end(headers: "CIMultiDict[str] | aiohttp.typedefs.LooseHeaders") -> "CIMultiDict[str]":
    kept = CIMultiDict(headers)
    dropped = _HOP_BY_HOP.union(
        name.strip().lower() for name in kept.get("Connection", "").split(",")
    )
    for name in dropped:
        kept.popall(name, None)
    return kept
