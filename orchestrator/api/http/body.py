"""JSON bodies, read within bounds and decoded."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.body_budget import BodyBudget, BodyShare
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.deadlines import stated_deadline
from orchestrator.api.http.decode import Reader, decode
from orchestrator.api.http.elsewhere import ELSEWHERE
from orchestrator.api.http.ignored import IGNORED_FIELDS, Ignored, passing_over
from orchestrator.api.http.large_bodies import LargeBodies
from orchestrator.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InvalidRequest,
    UnsupportedMediaType,
)
from protocol import excerpt

T = TypeVar("T")
R = TypeVar("R")

BODIES = web.AppKey("bodies", BodyBudget)

BODY_TIMEOUT_S: Final = 30.0
"""Seconds that a client may take to send a body, or the next piece of a file: enough for 4 MiB over
1.2 Mbit/s."""

INLINE_BYTES = 64 * 1024
"""Largest body that costs the event loop less than a millisecond, and is decoded on it."""

LARGE_BODIES = web.AppKey("large_bodies", LargeBodies)


async def read_body(request: web.Request, reader: Reader[T], make: Callable[[T], R]) -> R:
    """Read the request's body as ``reader``'s type; returns what ``make`` makes of it.

    Nothing else of the body is kept. For a large body both happen on a thread. Raises
    ``InvalidRequest`` or a kind of it, and ``DeadlineExceeded`` when the deadline of the headers
    passes meanwhile.
    """
    require_json(request)
    patience = asyncio.timeout(BODY_TIMEOUT_S)

    def give_up() -> None:
        """Stop reading, so that another body gets the room."""
        with suppress(RuntimeError):  # its own time has just run out
            patience.reschedule(0.0)

    with request.app[BODIES].share(give_up) as share:
        body = await _read(request, share, patience)
        if request.app[ELSEWHERE].keeps_bodies:
            request[CONTEXT].body = body
        with _ignored_by(request) as ignored:

            def work() -> R:
                with passing_over(ignored):
                    return make(decode(body, reader))

            if len(body) <= INLINE_BYTES:
                return work()
            policy, arrival = request.app[ORCHESTRATOR].deadlines, request[CONTEXT].arrival
            stated = stated_deadline(request.headers, arrival, policy)
            due_at = arrival.mono + policy.default_s if stated is None else stated.at
            tenant = request[CONTEXT].key.tenant
            return await request.app[LARGE_BODIES].work(work, len(body), due_at, tenant)


@contextmanager
def _ignored_by(request: web.Request) -> Iterator[Ignored | None]:
    """Collects what is ignored while the request is read, and reports it afterwards, even if the
    request is refused. Yields None where nothing may be ignored."""
    context, route = request[CONTEXT], request.match_info.route.resource
    if request.app[CONFIG].http.strict_fields or not context.dialect.is_tolerant or route is None:
        yield None
        return
    context.ignored = ignored = Ignored()
    try:
        yield ignored
    finally:
        request.app[IGNORED_FIELDS].tell(route.canonical, ignored)


def require_json(request: web.Request) -> None:
    """Raise ``UnsupportedMediaType`` unless the body is declared as plain JSON."""
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


async def _read(request: web.Request, share: BodyShare, patience: asyncio.Timeout) -> bytes:
    limit = request.app[CONFIG].http.max_body_bytes
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
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
