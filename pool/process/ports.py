"""Finds free ports, and formats a host with its port."""

import errno
import random
import socket
from collections.abc import Collection
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
    """``host:port`` as in a URL: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_ports(count: int, host: str = "127.0.0.1", but: Collection[int] = ()) -> list[int]:
    """``count`` different free ports, none of them in ``but``.

    The ports lie below those that the kernel gives to outgoing connections, and are drawn at
    random: a server may take seconds until it listens, and neither a connection nor another start
    is then likely to take it. Callers still try again with fresh ports if a server says that its
    port is taken. Raises ``PortInUse`` if there are fewer than ``count``, or ``host`` is not one of
    this machine's.
    """
    family, address = _resolve(host, 0)
    below = range(FIRST_PORT, _first_outgoing_port())
    candidates = random.sample(below, k=min(len(below), count + len(but) + 100))
    with ExitStack() as held:
        bound: list[int] = []
        # The port 0 lets the kernel choose.
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
                    f"cannot have {count} free ports on {host}: {error.strerror}; give an address "
                    "of this machine, and ask for fewer instances than it can run"
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


def require_free(host: str, port: int, remedy: str) -> None:
    """Raise ``PortInUse``, ending in ``remedy``, if ``host:port`` cannot be listened on."""
    if port > LAST_PORT:
        raise PortInUse(f"there is no port {port}, the last is {LAST_PORT}; {remedy}")
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
    """Whether ``host:port`` could be listened on right now."""
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
