"""Notices clients that hang up or vanish (WP-1).

A hang-up is the end of a client's input. While a connection is not read, because too many requests
came behind a running one, asyncio shows none, so the kernel is asked (``EPOLLRDHUP``).
"""

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress

VANISHED_S = 30
"""Time within which a client that vanishes with its machine or network, or reads nothing of what
waits for it, is noticed."""
_PROBE_AFTER_S = 15
_PROBE_EVERY_S = 5

CAN_WATCH = hasattr(select, "epoll")
"""Whether sockets can be watched without reading them: on Linux only. Elsewhere an end of input
goes unnoticed while nothing is read."""


def notice_vanished(client: socket.socket) -> None:
    """Make the kernel probe a silent client, and drop one that takes or acknowledges nothing.
    Otherwise its work would continue until its deadline, and sending for a quarter of an hour."""
    options = {
        "TCP_KEEPIDLE": _PROBE_AFTER_S,
        "TCP_KEEPINTVL": _PROBE_EVERY_S,
        "TCP_USER_TIMEOUT": 1000 * VANISHED_S,
    }
    with suppress(OSError):  # not a TCP socket, or closed already
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class HangUps:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call ``call`` once, at the end of the peer's input; the last call counts."""
        if fd not in self._calls:
            self._epoll.register(fd, select.EPOLLRDHUP)
        self._calls[fd] = call

    def unwatch(self, fd: int) -> None:
        """Stop watching a socket, before it is closed; no effect on one that is not watched."""
        if self._calls.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _look(self) -> None:
        for fd, _ in self._epoll.poll(0):
            call = self._calls.get(fd)
            self.unwatch(fd)
            if call is not None:
                call()
