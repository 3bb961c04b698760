"""``/v2/overview``: the service as a page or a terminal watches it.

A snapshot is taken once a second for all watchers, and only while there are any; it takes half a
millisecond with 80 requests waiting. The last minutes are kept for the next watcher: a page that is
reloaded has its curves at once.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

import msgspec
from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import CONTEXT
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.operator.snapshot import POINT, Finishes, point, snapshot, without_tenants
from orchestrator.errors import NoCapacity
from orchestrator.health import HealthBoard
from orchestrator.service import Orchestrator
from orchestrator.telemetry.log import service_log

EVERY_S = 1.0
HISTORY = 300
"""Most snapshots that are kept, as rows of a few figures each."""
MAX_WATCHERS = 64
_encode = msgspec.json.Encoder().encode


class Overview:
    """Takes the snapshots, and sends them to all watchers."""

    def __init__(self, orchestrator: Orchestrator, health: HealthBoard) -> None:
        self._orchestrator = orchestrator
        self._health = health
        self._finishes = Finishes(orchestrator)
        self._history: deque[tuple[float, ...]] = deque(maxlen=HISTORY)
        self._watchers: dict[EventStream, bool] = {}
        """Watchers, each with whether it may see the names of tenants."""
        self._taking: asyncio.Task[None] | None = None
        self._taken: dict[bool, bytes] = {}
        """The last snapshot, with the names of tenants and without."""
        self._taken_at = float("-inf")
        self._told = 0

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def latest(self, *, tenants: bool) -> bytes:
        """The last snapshot, or a new one if nobody has watched lately. ``tenants``: whether the
        reader may know of other tenants."""
        # A snapshot between two that are sent would take its finishes from the watchers.
        most_s = EVERY_S if self._taking is None else 2 * EVERY_S
        if self._orchestrator.clock.now() - self._taken_at >= most_s:
            self._take()
        return self._taken[tenants]

    def join(self, stream: EventStream, *, tenants: bool) -> Iterator[bytes]:
        """Send every snapshot from now on to ``stream``; yields what it is to have first. Raises
        ``NoCapacity``."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise NoCapacity(f"{MAX_WATCHERS} watch already", retry_after_ms=10_000)
        self._watchers[stream] = tenants
        if self._taking is None:
            self._orchestrator.on_offered.append(self._finishes.offered)
            self._taking = asyncio.create_task(self._keep_taking())
        return self._past(tenants)

    def leave(self, stream: EventStream) -> None:
        """End sending snapshots to ``stream``; without watchers no more are taken."""
        self._watchers.pop(stream, None)
        if self._watchers or self._taking is None:
            return
        self._taking.cancel()
        self._taking = None
        self._orchestrator.on_offered.remove(self._finishes.offered)

    def close(self) -> None:
        """End every stream, so that none delays the end of the service."""
        for stream in self._watchers:
            stream.finish()

    def _past(self, tenants: bool) -> Iterator[bytes]:
        past = {
            "every_ms": round(1000 * EVERY_S),
            "columns": POINT,
            "rows": list(self._history),
            "finishes": list(self._finishes.recent),
        }
        yield b"event: history\ndata: %b\n\n" % _encode(past)
        yield _event(self.latest(tenants=tenants))

    async def _keep_taking(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self._take()
            except Exception:
                service_log.exception("no overview could be taken; will retry")
                continue
            for stream, tenants in self._watchers.items():
                stream.offer(_event(self._taken[tenants]))

    def _take(self) -> None:
        taken = snapshot(self._orchestrator, self._health)
        taken["finishes"] = self._finishes.since(self._told)
        self._told = self._finishes.total
        self._finishes.next_snapshot()
        if self._taking is not None:
            self._history.append(tuple(point(taken)))
        with_tenants = _encode(taken)
        self._taken = {True: with_tenants, False: _encode(without_tenants(taken))}
        self._taken_at = self._orchestrator.clock.now()


def _event(taken: bytes) -> bytes:
    return b"event: overview\ndata: %b\n\n" % taken


OVERVIEW = web.AppKey("overview", Overview)


async def once(request: web.Request) -> web.Response:
    """Show the current state of the service."""
    body = request.app[OVERVIEW].latest(tenants=request[CONTEXT].key.sees_tenants)
    return web.Response(body=body, content_type="application/json")


async def events(request: web.Request) -> web.StreamResponse:
    """Stream the last minutes, then the current state of the service once a second."""
    overview = request.app[OVERVIEW]
    stream = EventStream(request, {}, request.app[CONFIG].keepalive_s)
    past = overview.join(stream, tenants=request[CONTEXT].key.sees_tenants)
    try:
        return await stream.run(past)
    finally:
        overview.leave(stream)


async def close(app: web.Application) -> None:
    """End all streams when the application ends, so that none delays it."""
    app[OVERVIEW].close()


def routes() -> list[web.RouteDef]:
    return [
        web.get("/v2/overview", once),
        # Its bytes go straight to the socket, where an answer to HEAD must have none.
        web.get("/v2/overview/events", events, allow_head=False),
    ]
