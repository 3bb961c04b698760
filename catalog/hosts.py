"""Addresses to listen on and to connect to. Standard library only."""

import ipaddress


def connect_host(host: str) -> str:
    """The address at which this machine reaches a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def is_wildcard(host: str) -> bool:
    """Whether ``host`` stands for all addresses of the machine."""
    return connect_host(host) != host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. Names other than localhost may be anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_numeric(host: str) -> bool:
    """Whether ``host`` is an IP address, rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
