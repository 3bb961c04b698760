"""Accepts connections as far as open files allow, and limits them in total and per address.

The last connections are reserved for operators::

    for all clients, 3/4 of them from one address │ operators │ beyond the limit
    ◀───────────── most - 16 ─────────────────▶ ◀── 16 ───▶ ◀── 64 at most ──▶
                                                ◀──── all but operators get ───▶
                                                      a 503 and are closed
"""

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from orchestrator.errors import NoCapacity
from orchestrator.telemetry.log import fields, service_log

if TYPE_CHECKING:
    from orchestrator.api.http.connection import Connection

RESERVED_CONNECTIONS = 16
"""Connections reserved for health checks, metrics and operators' calls, out of the total limit."""
MIN_CONNECTIONS = 2 * RESERVED_CONNECTIONS
_TURNED_AWAY = 64
"""Connections above the limit that may be open at a time, so that their requests get an answer."""
_MAX_OF_ONE = 0.75
"""Largest share (0 to 1) of the connections for one address, and for one of several keys."""


class KeyShares:
    """Limits the requests in progress of each key, and thereby its connections."""

    def __init__(self, most: int) -> None:
        """``most`` is the limit on all connections."""
        self._most = max(1, int(_MAX_OF_ONE * (most - RESERVED_CONNECTIONS)))
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def counted(self, key: str) -> Iterator[None]:
        """Count a request during the block. Raises ``NoCapacity`` if the key is at its limit."""
        if self._by_key[key] >= self._most:
            raise NoCapacity(
                f"{self._most} requests of this key are running, which is the most for one key; "
                "try again when some of them have ended",
                retry_after_ms=1000.0,
            )
        self._by_key[key] += 1
        try:
            yield
        finally:
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]


class ConnectionLimit:
    """Allows at most ``most`` connections, three quarters of them from one address."""

    def __init__(self, most: int) -> None:
        self._usual = most - RESERVED_CONNECTIONS
        self._beyond = RESERVED_CONNECTIONS + min(_TURNED_AWAY, most // 2)
        self._by_address: Counter[str] = Counter()
        self._reserved: dict[Connection, None] = {}
        """Connections above the limit for all clients, longest silence first."""

    def opened(self, connection: "Connection", address: str) -> bool:
        """Count a connection. Returns False if it is reserved: it then serves only some requests.
        If there are too many reserved connections, the one with the longest silence is closed."""
        own = self._by_address[address]
        most_of_one = max(1, _MAX_OF_ONE * self._usual)
        if self._by_address.total() < self._usual and own < most_of_one:
            self._by_address[address] += 1
            return True
        if len(self._reserved) >= self._beyond:
            silent = (other for other in self._reserved if not other.is_serving)
            gone = next(silent, connection)
            self._reserved.pop(gone, None)
            gone.turn_away()
        self._reserved[connection] = None
        return False

    def heard(self, connection: "Connection") -> None:
        """Note that a reserved connection received data: the others are closed before it."""
        if connection in self._reserved:
            self._reserved[connection] = self._reserved.pop(connection)

    def closed(self, connection: "Connection", address: str, *, is_reserved: bool) -> None:
        if is_reserved:
            self._reserved.pop(connection, None)
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


RESERVED_FILES = 256
"""Open files that are not available to clients' connections (at most half of all open files). They
are for lanes, logs, libraries, and connections that are turned away."""
ACCEPTS_PER_PASS = 16
"""Connections accepted in one pass of the event loop. If thousands arrive at once, it takes some
milliseconds to admit the request of each connection."""
LISTEN_BACKLOG = 1024
"""Connections that may wait in the kernel. Further clients retry after a second."""
READ_S = 0.02
"""Seconds to wait for the request on the connection that was accepted last."""
RETRY_S = 1.0
"""Seconds until the next attempt to accept connections after an error."""
_ENOUGH_FILES = 65536
_LOG_EVERY_S = 60.0

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


def most_connections() -> int:
    """Raise the limit of open files as far as allowed. Returns how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY:
        files = max(soft, files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(MIN_CONNECTIONS, files - min(RESERVED_FILES, files // 2))


class Port(asyncio.AbstractServer):
    """Listens at one address for the life of the process. Its server can be replaced.

    An asyncio server that closes loses connections that are accepted but not attached
    (cpython#109564). If another server then listens instead, connections in the kernel's queue are
    lost too. Here the socket stays open, and ``server`` gets the next connection.
    """

    def __init__(self, listening: Sequence[socket.socket], server: ProtocolFactory) -> None:
        self.server = server
        """Creates the protocol of each new connection."""
        self.on_handed_over: Callable[[], None] | None = None
        """Called when another server takes over the port."""
        self.sockets = tuple(listening)
        self._loop = asyncio.get_running_loop()
        self._attaching: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._log_at = 0.0
        self._failures = 0
        self._listen()

    @classmethod
    async def open(cls, host: str, port: int, server: ProtocolFactory) -> "Port":
        """Listen at every address of ``host``. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening: list[socket.socket] = []
        try:
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                made = socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
                made.setblocking(False)
                listening.append(made)
        except OSError:
            for each in listening:
                each.close()
            raise
        return cls(listening, server)

    def hand_over(self, server: ProtocolFactory) -> None:
        self.server = server
        if self.on_handed_over is not None:
            self.on_handed_over()

    def close(self) -> None:
        """Accept the connections that wait in the kernel, then no more (see ``wait_closed``)."""
        is_open = [listening for listening in self.sockets if listening.fileno() >= 0]
        for listening in is_open:  # connections in the kernel's queue would be reset
            self._accept(listening, LISTEN_BACKLOG + 1)
        if self._retry is not None:
            self._retry.cancel()
        for listening in is_open:
            self._loop.remove_reader(listening.fileno())
            listening.close()

    async def wait_closed(self) -> None:
        """Wait until each accepted connection has its protocol and its first data is read."""
        while self._attaching:
            await asyncio.wait(self._attaching)
        await asyncio.sleep(READ_S)

    def _listen(self) -> None:
        self._retry = None
        for listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket, most: int = ACCEPTS_PER_PASS) -> None:
        for _ in range(most):
            try:
                accepted = listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of files or memory: an immediate retry would fail too
                self._pause(error)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._attach(accepted))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self.server, accepted)
        except OSError:  # the client is gone
            accepted.close()

    def _pause(self, error: OSError) -> None:
        for listening in self.sockets:
            self._loop.remove_reader(listening.fileno())
        if self._retry is not None:  # from another socket, or from before the port closes
            self._retry.cancel()
        self._retry = self._loop.call_later(RETRY_S, self._listen)
        self._failures += 1
        if self._loop.time() < self._log_at:
            return
        self._log_at = self._loop.time() + _LOG_EVERY_S
        service_log.error(
            "cannot accept connections: %s",
            error.strerror or "out of resources",
            extra=fields(failures=self._failures),
        )
        self._failures = 0


class PortSite(web.BaseSite):
    """Makes an application serve a ``Port`` after ``start``."""

    def __init__(self, runner: web.AppRunner, port: Port) -> None:
        super().__init__(runner)
        self._port = port

    @property
    def name(self) -> str:
        host, port = self._port.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._server = self._port
        assert self._runner.server is not None
        self._port.hand_over(self._runner.server)

    async def stop(self) -> None:
        await super().stop()
        await self._port.wait_closed()
