"""Finds free ports, and formats ``host:port``."""

import errno
import random
import socket
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from catalog.errors import PortInUse

FIRST_PORT = 10_000
LAST_PORT = 65535
PORT_STRIDE = 10
"""Difference between the configured ports of one server and the next."""
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def host_port(host: str, port: int) -> str:
    """``host:port`` for a URL: an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_ports(count: int, host: str = "127.0.0.1", but: Collection[int] = ()) -> list[int]:
    """``count`` different free ports, none of them in ``but``.

    The ports are below the kernel's range for outgoing connections, and drawn at random. A server
    may take seconds until it listens; this makes it unlikely that a connection or another start
    takes its port. Callers still retry with new ports if a server reports that its port is taken.
    Raises ``PortInUse`` if there are fewer than ``count``, or ``host`` is not an address of this
    machine.
    """
    family, address = _resolve(host, 0)
    below = range(FIRST_PORT, _first_outgoing_port())
    candidates = random.sample(below, k=min(len(below), count + len(but) + 100))
    with ExitStack() as held:
        bound: list[int] = []
        # For port 0, the kernel chooses.
        for port in [*candidates, *[0] * (count + len(but))]:
            if len(bound) == count:
                break
            if port in but:
                continue
            try:
                each = held.enter_context(socket.socket(family))
                each.bind((address[0], port, *address[2:]))
            except OSError as error:
                if port and error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise PortInUse(
                    f"cannot find {count} free ports on {host}: {error.strerror}; give an address "
                    "of this machine, or fewer instances"
                ) from error
            number = int(each.getsockname()[1])
            if number not in but:
                bound.append(number)
        return bound


def _first_outgoing_port() -> int:
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768  # Linux's default


def choose_ports(
    host: str,
    asked: Sequence[int],
    remedy: str,
    *,
    kept: Sequence[int] = (0, 0, 0),
    but: Collection[int] = (),
) -> list[int]:
    """The requested ports; for each 0, the earlier one if it is free, else a free one not in
    ``but``. Raises ``PortInUse``, ending in ``remedy`` for a requested port."""
    for port in filter(None, asked):
        require_free(host, port, remedy)
    chosen = [
        fixed or (before if before and is_free(host, before) else 0)
        for fixed, before in zip(asked, kept, strict=False)
    ]
    free = iter(free_ports(chosen.count(0), host, {*asked, *kept, *but} - {0}))
    return [port or next(free) for port in chosen]


def require_free(host: str, port: int, remedy: str) -> None:
    """Raise ``PortInUse``, ending in ``remedy``, if ``host:port`` cannot be listened on."""
    if port > LAST_PORT:
        raise PortInUse(f"there is no port {port}, the highest is {LAST_PORT}; {remedy}")
    family, address = _resolve(host, port)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {host_port(host, port)}: {error.strerror}; {remedy}"
            ) from error


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on ``host:port`` now."""
    try:
        require_free(host, port, "")
    except PortInUse:
        return False
    return True


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, _SocketAddress]:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise PortInUse(f"cannot listen on {host!r}: {reason}; give an address") from error
    return found[0], found[4]
