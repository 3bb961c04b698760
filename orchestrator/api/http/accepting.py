"""Accepting connections, as many as open files allow; failures are logged once a minute."""

import asyncio
import os
import resource
import socket
from typing import Any

from orchestrator.api.http.connection_limit import MIN_CONNECTIONS
from orchestrator.telemetry.log import fields, service_log

_RESERVED_FILES = 256
"""Open files that clients' connections never take, or half of all where there are few: for lanes,
logs, libraries, and connections that are turned away."""
ACCEPTS_PER_PASS = 16
"""Connections accepted in one pass of the event loop: admitting the request that comes with each
takes some milliseconds when thousands come at once. asyncio calls this the backlog."""
LISTEN_BACKLOG = 1024
"""Connections that may wait in the kernel; clients beyond them retry after a second."""
_ENOUGH_FILES = 65536
_LOG_EVERY_S = 60.0


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


def widen_backlog(server: asyncio.AbstractServer | None) -> None:
    """Let more connections wait in the kernel than asyncio accepts per pass; asyncio uses one
    number for both."""
    assert isinstance(server, asyncio.Server)
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(LISTEN_BACKLOG)


class QuietAccept:
    """An event loop's exception handler that logs failures to accept in one line, once a minute."""

    def __init__(self) -> None:
        self._log_at = 0.0
        self._failures = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        self._failures += 1
        if loop.time() < self._log_at:
            return
        self._log_at = loop.time() + _LOG_EVERY_S
        service_log.error(
            "cannot accept connections: %s",
            getattr(context.get("exception"), "strerror", None) or "out of resources",
            extra=fields(failures=self._failures),
        )
        self._failures = 0
