"""Ports on the loopback interface."""

import ipaddress
import socket
from contextlib import ExitStack

from orchestrator.provision.errors import PortInUse


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports that nobody listens on right now.

    Another process may take one before we use it: callers retry with fresh ports when a server
    says that its port is taken.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def require_free(host: str, port: int, remedy: str) -> None:
    """Raise ``PortInUse``, ending in ``remedy``, when ``host:port`` cannot be listened on."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PortInUse(f"cannot listen on {host!r}: {error.strerror}; give an address") from error
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {host}:{port}: {error.strerror}; {remedy}"
            ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. A name other than localhost may be
    anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_free(host: str, port: int) -> bool:
    """Whether ``host:port`` could be listened on right now."""
    try:
        require_free(host, port, "")
    except PortInUse:
        return False
    return True
