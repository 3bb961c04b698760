"""JSON bodies: read within bounds, decoded to a type, with errors that name what was wrong."""

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web

from orchestrator.api.choices import choices_at
from orchestrator.api.context import GATEWAY
from orchestrator.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InvalidRequest,
    UnsupportedMediaType,
)

T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""Up to this many bytes a body costs the event loop less than a millisecond."""

_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")


class LargeBodies:
    """Turns large bodies into requests on a thread, one after the other.

    The decoder holds the interpreter lock throughout, for some 10 ms a megabyte, so the thread
    rests after each as long as it took: between two of them everybody else has a turn.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidegate-bodies")
        self._rests_until = 0.0

    async def work(self, call: Callable[[], T]) -> T:
        """What ``call`` returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._work, call)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

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


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The request's body as ``decoder``'s type. Raises ``InvalidRequest`` or a kind of it."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        # Nothing else may pass for JSON: a web page may send some kinds of body without asking.
        # aiohttp reports a missing header as application/octet-stream.
        got = request.content_type if "Content-Type" in request.headers else "none"
        raise UnsupportedMediaType(
            f"expected Content-Type: application/json, got {got}; "
            "with curl add -H 'Content-Type: application/json'",
            field="Content-Type",
        )
    for encoding in request.headers.getall("Content-Encoding", ()):
        if encoding.strip().lower() not in ("", "identity"):
            raise UnsupportedMediaType(
                f"expected a body without Content-Encoding, got {encoding[:64]}",
                field="Content-Encoding",
            )
    body = await _read(request)
    return await of_body(request, lambda: decode(body, decoder))


async def of_body(request: web.Request, call: Callable[[], T]) -> T:
    """What ``call`` makes of a body that has been read: at once, or aside for a large one."""
    if len(await request.read()) <= INLINE_BYTES:
        return call()
    return await request.app[LARGE_BODIES].work(call)


async def _read(request: web.Request) -> bytes:
    settings = request.app[GATEWAY].settings
    limit = settings.max_body_bytes
    too_large = BodyTooLarge(f"the body must have at most {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        raise InvalidRequest("the body is not framed as the headers say") from None
    except TimeoutError:
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
    for pattern, wording in (
        (_UNKNOWN_FIELD, "is not a known field"),
        (_MISSING_FIELD, "is required"),
    ):
        match = pattern.search(message)
        if match:
            field = f"{path}.{match[1]}" if path else match[1]
            return InvalidRequest(f"{field}: {wording}", field=field)
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    if message.startswith(("Invalid enum value", "Invalid value")):
        choices = ", ".join(choices_at(expected, path))
        if choices:
            message = f"{message}; expected one of: {choices}"
    return InvalidRequest(f"{path}: {message}", field=path)
