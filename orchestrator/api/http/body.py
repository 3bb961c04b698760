"""Reads JSON bodies within bounds and decodes them.

One budget limits the bytes of bodies on all connections. Bytes count when they arrive; a
Content-Length reserves nothing. No body waits for room. If the budget is full, the largest
unfinished body is dropped if it is larger than the growing body; otherwise the growing body is
dropped. So a few large bodies that never end cannot keep small bodies out.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from typing import Any, Final, TypeVar

from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.deadlines import stated_deadline
from orchestrator.api.http.decode import decode
from orchestrator.api.http.finding import ELSEWHERE
from orchestrator.api.http.ignored import IGNORED_FIELDS, passing_over
from orchestrator.errors import (
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    InvalidRequest,
    NoCapacity,
    UnsupportedMediaType,
)
from orchestrator.fair_share import FairGate
from protocol import excerpt

ALL_BODIES_BYTES: Final = 256 * 2**20
"""Most bytes of all bodies together: 64 bodies of the default maximum size."""
RETRY_AFTER_MS = 1000.0
SMALL_BYTES = 64 * 2**10
"""Largest body that may use the last eighth of the budget. Complete bodies that wait to be decoded
are never dropped. Without this limit they could fill the budget."""


class BodyShare:
    """One body's share of the budget."""

    def __init__(self, budget: "BodyBudget", give_up: Callable[[], None]) -> None:
        self._budget = budget
        self.give_up = give_up
        self.held_bytes = 0
        self.is_given_up = False

    def take(self, count: int) -> None:
        """Count received bytes. Raises ``NoCapacity`` if the budget has no room for them."""
        if self.is_given_up or not self._budget.make_room(self, count):
            raise self.refusal()
        self.held_bytes += count

    def finish(self) -> None:
        """Mark the body as complete: it is no longer dropped. Raises ``NoCapacity`` if it was."""
        if self.is_given_up:
            raise self.refusal()
        self._budget.unfinished.pop(self, None)

    def refusal(self) -> NoCapacity:
        return NoCapacity(
            f"too many request bodies are arriving at once: the limit is {self._budget.most_bytes} "
            "bytes together; try again shortly",
            retry_after_ms=RETRY_AFTER_MS,
        )


class BodyBudget:
    """Limits all bodies together to ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self.unfinished: dict[BodyShare, None] = {}

    @contextmanager
    def share(self, give_up: Callable[[], None]) -> Iterator[BodyShare]:
        """A body's share until the end of the block. ``give_up`` is called if the body is dropped.
        It must stop the reading soon and must not raise."""
        share = BodyShare(self, give_up)
        self.unfinished[share] = None
        try:
            yield share
        finally:
            self.unfinished.pop(share, None)
            self._release(share)

    def make_room(self, share: BodyShare, count: int) -> bool:
        """Count ``count`` more bytes for ``share``. Returns False if there is no room for them."""
        is_small = share.held_bytes + count <= SMALL_BYTES
        most = self.most_bytes if is_small else self.most_bytes * 7 // 8
        while self.total_bytes + count > most:
            others = (other for other in self.unfinished if other is not share)
            largest = max(others, key=lambda other: other.held_bytes, default=None)
            if largest is None or largest.held_bytes <= share.held_bytes + count:
                return False
            del self.unfinished[largest]
            self._release(largest)
            largest.is_given_up = True
            largest.give_up()
        self.total_bytes += count
        return True

    def check_integrity(self) -> None:
        assert 0 <= self.total_bytes <= self.most_bytes
        assert sum(share.held_bytes for share in self.unfinished) <= self.total_bytes
        assert not any(share.is_given_up for share in self.unfinished)

    def _release(self, share: BodyShare) -> None:
        self.total_bytes -= share.held_bytes
        share.held_bytes = 0


T = TypeVar("T")
R = TypeVar("R")

_BYTES_PER_S = 2**20
"""Bytes of a body that move it back by one second in its tenant's order."""


class Patience:
    """The time limit for a body: ``BODY_TIMEOUT_S``, plus its bytes divided by
    ``LEAST_BYTES_PER_S``. Time during which no handler reads does not count."""

    def __init__(self) -> None:
        self._left_s = BODY_TIMEOUT_S
        self._timeout: asyncio.Timeout | None = None

    async def read(self, piece: Awaitable[T]) -> T:
        """The next piece. Raises ``BodyTooSlow``."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left_s) as self._timeout:
                return await piece
        except TimeoutError:
            raise BodyTooSlow(
                f"the body arrived too slowly: the limit is {BODY_TIMEOUT_S:g} s plus 1 s for each "
                f"{LEAST_BYTES_PER_S:.0f} bytes; send it faster or in parts"
            ) from None
        finally:
            self._left_s -= loop.time() - began

    def came(self, count: int) -> None:
        """Count received bytes."""
        self._left_s += count / LEAST_BYTES_PER_S

    def end(self) -> None:
        """Stop waiting."""
        self._left_s = 0.0
        if self._timeout is not None:
            with suppress(RuntimeError):  # already expired, or no handler is reading
                self._timeout.reschedule(0.0)


class LargeBodies:
    """Decodes large bodies on one thread, one at a time, alternating between tenants.

    The decoder holds the GIL for about 10 ms per megabyte. So the thread sleeps after each body for
    as long as the decoding took. Within a tenant, each megabyte (2**20 bytes) of a body counts like
    one second of later arrival.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidegate-bodies")
        self._gate = FairGate()
        self._rests_until = 0.0

    async def work(self, call: Callable[[], T], size: int, due_at: float, tenant: str = "") -> T:
        """Run ``call`` on the thread. ``size`` is the body's size in bytes; ``due_at`` is a time of
        the loop's clock. Raises ``DeadlineExceeded`` if ``call`` has not started by then."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(due_at):
                await self._gate.enter(tenant, loop.time() + size / _BYTES_PER_S)
        except TimeoutError:
            late_s = loop.time() - due_at
            raise DeadlineExceeded.before("the body was read; send less", late_s) from None
        began = loop.time()

        def done(work: "asyncio.Future[Any]") -> None:
            if not work.cancelled():
                work.exception()  # the client may be gone
            self._gate.leave(tenant, loop.time() - began)

        run = copy_context().run
        work = loop.run_in_executor(self._executor, run, self._work, call)
        work.add_done_callback(done)
        return await asyncio.shield(work)

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


BODIES = web.AppKey("bodies", BodyBudget)

BODY_TIMEOUT_S: Final = 30.0
"""Seconds for a body: enough for 4 MiB at 1.2 Mbit/s."""
LEAST_BYTES_PER_S: Final = 4 * 2**20 / BODY_TIMEOUT_S
"""Lowest average rate of a body that takes longer than ``BODY_TIMEOUT_S``."""

INLINE_BYTES = 64 * 1024
"""Largest body that is decoded on the event loop. It takes less than a millisecond."""

LARGE_BODIES = web.AppKey("large_bodies", LargeBodies)


async def read_body(request: web.Request, kind: type[T], make: Callable[[T], R]) -> R:
    """Read the request's body as ``kind`` and return the result of ``make``; keep nothing else.
    Raises ``InvalidRequest`` or a subclass, and ``DeadlineExceeded`` if the deadline in the headers
    passes first."""
    async with _held(request) as body:
        if request.app[ELSEWHERE].keeps_bodies:
            request[CONTEXT].body = body
        with _ignoring(request):
            if len(body) <= INLINE_BYTES:
                return make(decode(body, kind))
            policy, arrival = request.app[ORCHESTRATOR].deadlines, request[CONTEXT].arrival
            stated = stated_deadline(request.headers, arrival, policy)
            due_at = arrival.mono + policy.default_s if stated is None else stated.at
            tenant = request[CONTEXT].key.tenant
            return await request.app[LARGE_BODIES].work(
                lambda: make(decode(body, kind)), len(body), due_at, tenant
            )


@asynccontextmanager
async def _held(request: web.Request) -> AsyncIterator[bytes]:
    """The complete JSON body. It keeps its share of the budget until the end of the block."""
    _require_json(request)
    patience = Patience()
    with request.app[BODIES].share(patience.end) as share:
        yield await _read(request, share, patience)


@contextmanager
def _ignoring(request: web.Request) -> Iterator[None]:
    """Ignore unsupported fields while the request is read, and report them at the end, also if the
    request is refused. No effect if unknown fields are errors."""
    context, route = request[CONTEXT], request.match_info.route.resource
    if request.app[CONFIG].http.strict_fields or not context.dialect.is_tolerant or route is None:
        yield
        return
    try:
        with passing_over(context.ignored):
            yield
    finally:
        request.app[IGNORED_FIELDS].tell(route.canonical, context.ignored)


def _require_json(request: web.Request) -> None:
    """Raise ``UnsupportedMediaType`` unless the headers declare a plain JSON body."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        # Accept no other type: web pages can send some types without a preflight request.
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


async def _read(request: web.Request, share: BodyShare, patience: Patience) -> bytes:
    limit = request.app[CONFIG].http.max_body_bytes
    too_large = BodyTooLarge(f"the body must have at most {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    try:
        while chunk := await patience.read(request.content.readany()):
            share.take(len(chunk))
            patience.came(len(chunk))
            body += chunk
            if len(body) > limit:
                raise too_large
        share.finish()
        return bytes(body)
    except web.RequestPayloadError:
        raise InvalidRequest("the body's framing does not match the headers") from None
    except BodyTooSlow:
        if share.is_given_up:
            raise share.refusal() from None
        raise
