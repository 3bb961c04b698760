"""JSON bodies: read within bounds, decoded to a type, with errors that name what was wrong."""

import asyncio
import heapq
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from orchestrator.api.http.body_budget import BodyBudget, BodyShare
from orchestrator.api.http.choices import choices_at
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.deadlines import read_deadline
from orchestrator.errors import (
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    InvalidRequest,
    UnsupportedMediaType,
)
from worker.protocol import excerpt

T = TypeVar("T")
R = TypeVar("R")

BODIES = web.AppKey("bodies", BodyBudget)

INLINE_BYTES = 64 * 1024
"""Up to this many bytes a body costs the event loop less than a millisecond."""

_BYTES_PER_S = 2**20
"""What a large body yields to smaller ones that come after it."""

_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")


class LargeBodies:
    """Turns large bodies into requests on a thread, one after the other.

    The decoder holds the interpreter lock throughout, for some 10 ms a megabyte, so the thread
    rests after each as long as it took: between two of them everybody else has a turn. A body goes
    before those that came up to a second earlier for each megabyte that they are larger.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidegate-bodies")
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = count()
        self._is_busy = False
        self._rests_until = 0.0

    async def work(self, call: Callable[[], T], size: int, due_at: float) -> T:
        """What ``call`` returns or raises. ``size`` is the body's, in bytes; ``due_at`` is on the
        loop's clock. Raises ``TimeoutError`` when its turn has not come by then.
        """
        loop = asyncio.get_running_loop()
        if self._is_busy:
            turn = asyncio.Event()
            place = loop.time() + size / _BYTES_PER_S
            heapq.heappush(self._waiting, (place, next(self._numbers), turn))
            try:
                async with asyncio.timeout_at(due_at):
                    await turn.wait()
            except (asyncio.CancelledError, TimeoutError):
                if turn.is_set():
                    self._next()
                else:
                    self._waiting = [entry for entry in self._waiting if entry[2] is not turn]
                    heapq.heapify(self._waiting)
                raise
        self._is_busy = True
        work = loop.run_in_executor(self._executor, self._work, call)
        work.add_done_callback(self._done)
        return await asyncio.shield(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: "asyncio.Future[Any]") -> None:
        if not work.cancelled():
            work.exception()  # whoever asked may be gone, and it is no news then
        self._next()

    def _next(self) -> None:
        """Give the thread to the next one."""
        self._is_busy = bool(self._waiting)
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()

    def _work(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        if began < self._rests_until:
            time.sleep(self._rests_until - began)
            began = time.monotonic()
        try:
            return call()
        finally:
            ended = time.monotonic()
            self._rests_until = ended + (ended - began)


LARGE_BODIES = web.AppKey("large_bodies", LargeBodies)


async def read_body(
    request: web.Request, decoder: msgspec.json.Decoder[T], make: Callable[[T], R]
) -> R:
    """What ``make`` makes of the request's body as ``decoder``'s type; nothing else of it stays.

    For a large body both happen on a thread. Raises ``InvalidRequest`` or a kind of it, and
    ``DeadlineExceeded`` when the deadline of the headers passes meanwhile.
    """
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        # Nothing else may pass for JSON: a web page may send some kinds of body without asking.
        # aiohttp reports a missing header as application/octet-stream.
        got = excerpt(request.content_type) if "Content-Type" in request.headers else "none"
        raise UnsupportedMediaType(
            f"expected Content-Type: application/json, got {got}; "
            "with curl add -H 'Content-Type: application/json'",
            field="Content-Type",
        )
    for encoding in request.headers.getall("Content-Encoding", ()):
        if encoding.strip().lower() not in ("", "identity"):
            raise UnsupportedMediaType(
                f"expected a body without Content-Encoding, got {excerpt(encoding)}",
                field="Content-Encoding",
            )
    patience = asyncio.timeout(request.app[ORCHESTRATOR].settings.body_timeout_s)

    def give_up() -> None:
        """End the reading: another body gets the room."""
        with suppress(RuntimeError):  # its own time has just run out
            patience.reschedule(0.0)

    with request.app[BODIES].share(give_up) as share:
        body = await _read(request, share, patience)
        if len(body) <= INLINE_BYTES:
            return make(decode(body, decoder))
        due_at = _due_at(request)
        try:
            return await request.app[LARGE_BODIES].work(
                lambda: make(decode(body, decoder)), len(body), due_at
            )
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed before the body was read; send less",
                exceeded_by_ms=1000 * (request.app[ORCHESTRATOR].clock.now() - due_at),
            ) from None


def _due_at(request: web.Request) -> float:
    """The deadline as far as it is known without the body."""
    orchestrator, arrival = request.app[ORCHESTRATOR], request[CONTEXT].arrival
    try:
        return read_deadline(request.headers, None, arrival, orchestrator.deadlines).at
    except InvalidRequest:  # is told with all that the body says
        return arrival.mono + orchestrator.deadlines.default_s


async def _read(request: web.Request, share: BodyShare, patience: asyncio.Timeout) -> bytes:
    settings = request.app[ORCHESTRATOR].settings
    limit = settings.max_body_bytes
    too_large = BodyTooLarge(f"the body must have at most {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    try:
        async with patience:
            while chunk := await request.content.readany():
                share.take(len(chunk))
                body += chunk
                if len(body) > limit:
                    raise too_large
            share.finish()
            return bytes(body)
    except web.RequestPayloadError:
        raise InvalidRequest("the body is not framed as the headers say") from None
    except TimeoutError:
        if share.is_given_up:
            raise share.refusal() from None
        raise BodyTooSlow(f"the body did not arrive within {settings.body_timeout_s:g} s") from None


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Bytes as ``decoder``'s type. Raises ``InvalidRequest`` naming the field that is wrong."""
    if not body.strip():
        raise InvalidRequest("the body is empty; expected a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _invalid(message: str, expected: type) -> InvalidRequest:
    where = _AT.search(message)
    path = where[1] if where else ""
    message = _AT.sub("", message)
    path = excerpt(path)
    for pattern, wording in (
        (_UNKNOWN_FIELD, "is not a known field"),
        (_MISSING_FIELD, "is required"),
    ):
        match = pattern.search(message)
        if match:
            field = excerpt(f"{path}.{match[1]}" if path else match[1])
            return InvalidRequest(f"{field}: {wording}", field=field)
    message = excerpt(message, 200)
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    if message.startswith(("Invalid enum value", "Invalid value")):
        choices = ", ".join(choices_at(expected, path))
        if choices:
            message = f"{message}; expected one of: {choices}"
    return InvalidRequest(f"{path}: {message}", field=path)
