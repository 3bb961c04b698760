"""Addresses to listen on, and to reach who listens there. Standard library only."""

import ipaddress


def connect_host(host: str) -> str:
    """Where to reach, from this machine, who listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. A name other than localhost may be
    anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
