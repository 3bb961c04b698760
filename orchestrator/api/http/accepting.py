"""Accepting connections, as many as open files allow; failures are logged once a minute."""

import asyncio
import resource
import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from orchestrator.api.http.connection_limit import MIN_CONNECTIONS
from orchestrator.telemetry.log import fields, service_log

_RESERVED_FILES = 256
"""Open files that clients' connections never take, or half of all where there are few: for lanes,
logs, libraries, and connections that are turned away."""
ACCEPTS_PER_PASS = 16
"""Connections accepted in one pass of the event loop: admitting the request that comes with each
takes some milliseconds when thousands come at once."""
LISTEN_BACKLOG = 1024
"""Connections that may wait in the kernel; clients beyond them retry after a second."""
RETRY_S = 1.0
"""Time until connections are accepted again after none could be, in seconds."""
_ENOUGH_FILES = 65536
_LOG_EVERY_S = 60.0

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def most_connections() -> int:
    """How many connections the process's limit of open files, raised as far as it may be,
    allows."""
    files = raise_file_limit()
    return max(MIN_CONNECTIONS, files - min(_RESERVED_FILES, files // 2))


class Port(asyncio.AbstractServer):
    """Listens at one address for the life of the process, for a server that may be replaced.

    asyncio's own server loses a connection that it has accepted and not attached when it closes
    (cpython#109564), and one that closes for another to listen anew loses what waits in the kernel.
    Here the socket stays, and ``server`` decides who gets the next connection.
    """

    def __init__(self, listening: Sequence[socket.socket], server: ProtocolFactory) -> None:
        self.server = server
        """Makes the protocol of each new connection."""
        self.on_handed_over: Callable[[], None] | None = None
        """Called when another server takes the port."""
        self.sockets = tuple(listening)
        self._loop = asyncio.get_running_loop()
        self._attaching: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._log_at = 0.0
        self._failures = 0
        self._listen()

    @classmethod
    async def open(
        cls, host: str, port: int, server: ProtocolFactory, *, is_shared: bool = False
    ) -> "Port":
        """Listen at every address of ``host``; ``is_shared``: as one of several processes. Raises
        ``OSError``."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening: list[socket.socket] = []
        try:
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                made = socket.create_server(
                    address[:2], family=family, backlog=LISTEN_BACKLOG, reuse_port=is_shared
                )
                made.setblocking(False)
                listening.append(made)
        except OSError:
            for each in listening:
                each.close()
            raise
        return cls(listening, server)

    def hand_over(self, server: ProtocolFactory) -> None:
        """Have another server get the next connections."""
        self.server = server
        if self.on_handed_over is not None:
            self.on_handed_over()

    def close(self) -> None:
        """Accept no more. Connections that were accepted are attached still: see
        ``wait_closed``."""
        if self._retry is not None:
            self._retry.cancel()
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening.fileno())
                listening.close()

    async def wait_closed(self) -> None:
        """Wait until each connection that was accepted has its protocol."""
        while self._attaching:
            await asyncio.wait(self._attaching)

    def _listen(self) -> None:
        self._retry = None
        for listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_PASS):
            try:
                accepted = listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of files or memory: the kernel would call again at once
                self._pause(error)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._attach(accepted))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self.server, accepted)
        except OSError:  # the client has gone
            accepted.close()

    def _pause(self, error: OSError) -> None:
        for listening in self.sockets:
            self._loop.remove_reader(listening.fileno())
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
    """Has an application serve a ``Port`` from ``start`` on."""

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
