"""Tells clients that hang up from clients that have only finished sending (WP-1).

TCP shows the same end of input (FIN) for both. While a connection is not read, because too many
requests came after a running one, it shows nothing at all. So the kernel is asked about such a
connection (``EPOLLRDHUP``), and at the end of input something is sent that has no meaning: a closed
socket answers it with a reset, a half-closed one acknowledges it::

    end of input ─▶ 100 Continue, or a comment in an event stream ─┬─ reset: gone
                            ▲                                      ├─ not acknowledged: gone
                            └────── again and again ◀──────────────┴─ acknowledged: half-closed

It is sent several times because a proxy between the two may only pass the end on, and learns of a
reset by what it passes next.

Ending a request takes some 0.2 ms, and a proxy that restarts takes a thousand clients with it in
one pass of the event loop. ``Losses`` spreads that work over several passes.
"""

import asyncio
import fcntl
import select
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

NOTICE_WITHIN_S = 0.2
"""A client that has acknowledged nothing for this long is gone."""
_OFTEN_S = 0.05
_RARELY_S = 1.0

VANISHED_S = 30
"""Time within which a client that vanishes with its machine or network is noticed."""
_PROBE_AFTER_S = 15
_PROBE_EVERY_S = 5

CAN_WATCH = hasattr(select, "epoll")
"""Whether sockets can be watched without reading them: on Linux only. Elsewhere an end of input
counts as a hang-up, and goes unnoticed while nothing is read."""


def notice_vanished(client: socket.socket) -> None:
    """Make the kernel probe a silent client, and drop one that acknowledges nothing. Otherwise its
    work would continue until its deadline, and sending for a quarter of an hour."""
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

    def watch(self, fd: int, call: Callable[[], None], *, end_of_input: bool) -> None:
        """Call ``call`` once, when the peer is gone or at its ``end_of_input``. A socket is watched
        for one thing at a time; the last call counts."""
        events = select.EPOLLRDHUP if end_of_input else 0  # errors and hang-ups are always reported
        if fd in self._calls:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
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


class HalfClosed(Protocol):
    """A connection whose client has finished sending."""

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being sent, which may be acknowledged slowly."""

    def probe(self) -> bool:
        """Send something without meaning; False if its acknowledgement must not be waited for."""

    def gone(self) -> None:
        """Handle that the client has hung up; nothing is called after this."""


class Prober:
    """Asks such a client repeatedly whether it is still there; resets are noticed elsewhere."""

    def __init__(self, asked: HalfClosed, transport: asyncio.Transport, fd: int) -> None:
        self._asked = asked
        self._transport = transport
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._often_until = self._loop.time() + NOTICE_WITHIN_S
        self._waits_since: float | None = None
        """When the unacknowledged probe was sent; None without one."""
        self._timer: asyncio.Handle = self._loop.call_soon(self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now, since = self._loop.time(), self._waits_since
        if since is not None and not self._asked.is_answering and self._unacknowledged():
            if now >= since + NOTICE_WITHIN_S:
                self._asked.gone()
                return
            self._timer = self._loop.call_later(_OFTEN_S, self._look)
            return
        self._timer = self._loop.call_later(
            _OFTEN_S if now < self._often_until else _RARELY_S, self._look
        )
        self._waits_since = now if self._asked.probe() else None

    def _unacknowledged(self) -> bool:
        """Whether we or the kernel hold something that the client has not acknowledged."""
        if self._transport.get_write_buffer_size():
            return True
        return unacknowledged_bytes(self._fd) > 0


def unacknowledged_bytes(fd: int) -> int:
    """Bytes that the kernel has sent or will send on a socket and the peer has not acknowledged."""
    return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)


PER_PASS = 16
"""Lost clients handled in one pass of the event loop: about 3 ms of work."""


class Losses:
    """Calls back for each loss, in order: at once while few come in one pass of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = PER_PASS
        """Calls that this pass may still make."""
        self._is_counting = False

    def add(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, now or in one of the next passes."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._next_pass)
        if self._left and not self._waiting:
            self._left -= 1
            call()
        else:
            self._waiting.append(call)

    def _next_pass(self) -> None:
        self._is_counting = bool(self._waiting)
        self._left = PER_PASS
        if not self._is_counting:
            return
        self._loop.call_soon(self._next_pass)
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
