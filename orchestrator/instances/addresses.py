"""Checks the entries that name instances: ``host:port``, ``dns:host:port``, or a URL for
another kind of server (``orchestrator.lanes.endpoint``).
"""

from orchestrator.lanes.endpoint import is_url, read_endpoint

DNS_PREFIX = "dns:"
MAX_CHARS = 4096
"""Maximum characters of an address: a URL with a tokenizer's folder."""
_MAX_HOST_CHARS = 300
"""Maximum characters of ``host:port``: a host name has at most 253."""


def check_address(text: str) -> str:
    """Return ``text`` if it is ``host:port`` or a URL of another kind. Raises ``ValueError``."""
    if len(text) > MAX_CHARS or not text.isprintable():
        raise ValueError(
            f"expected at most {MAX_CHARS} characters, all of them printable, got {text[:64]!r}"
        )
    if is_url(text):
        read_endpoint(text)
        return text
    if len(text) > _MAX_HOST_CHARS:
        raise ValueError(f"a host has at most 253 characters, got {text[:64]!r}…")
    if "/" in text:
        raise ValueError(f"expected host:port without a scheme or path, got {text!r}")
    if any(character.isspace() for character in text):
        raise ValueError(f"expected one host:port without a space, got {text!r}")
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise ValueError(f"expected host:port, got {text!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"an IPv6 address needs brackets, as [::1]:8001, got {text!r}")
    if not 0 < int(port) < 65536:
        raise ValueError(f"the port must be 1 to 65535, got {text!r}")
    return text


def check_entry(text: str) -> str:
    """Return ``text`` if it names an instance or a source of them. Raises ``ValueError``."""
    if text.startswith(DNS_PREFIX) and is_url(text):
        raise ValueError(f"expected dns:host:port, got {text[:256]!r}: a URL names one instance")
    check_address(text.removeprefix(DNS_PREFIX))
    return text


def is_source(entry: str) -> bool:
    """Whether an entry is a source of changing addresses instead of one address."""
    return entry.startswith(DNS_PREFIX)
