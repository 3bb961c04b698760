"""The operators' key of a service on this machine, used if its settings have no admin key.

An orchestrator creates a key when it starts to listen and keeps it, until it ends, in a file that
only its own user can read::

    TIDEGATE_HOME/operator/127.0.0.1-8080

Every process that can read the file may operate the service; the command ``tidegate`` and the pool
manager read it automatically. The next orchestrator at an address reuses a killed one's key, so
that an open page keeps working.

Standard library only.
"""

import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from catalog.atomic import write_atomically
from catalog.hosts import connect_host
from catalog.paths import state_dir

_KEY_CHARS = 43
"""Number of base64 characters that 32 bytes take."""
_IPV4 = "127.0.0.1"
_SAME_HOST = {"localhost": _IPV4, _IPV4: "localhost"}
"""Two names of one host: a service that listens on one may be addressed by the other."""


class Access(NamedTuple):
    """URL and key for operator requests; ``key`` is empty if none is kept here."""

    url: str
    key: str


def key_file(home: Path, host: str, port: int) -> Path:
    """The file with the key of the service that listens at ``host`` and ``port``."""
    name = re.sub(r"[^A-Za-z0-9.-]", "_", connect_host(host))
    return home / "operator" / f"{name}-{port}"


def keep_key(path: Path) -> str:
    """The key kept at ``path``; a new one if there is none, or if others could have read it.

    Raises ``OSError``.
    """
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(0, f"{folder} must belong to this user, writable for no other")
    key = _read(path)
    if len(key) < _KEY_CHARS:
        key = secrets.token_urlsafe(32)
        write_atomically(path, f"{key}\n".encode(), 0o600)
    return key


def access(url: str, home: Path | None = None) -> Access:
    """URL and key to operate the service at ``url``, if its key is kept on this machine.

    ``localhost`` becomes ``127.0.0.1`` if the service listens only there: another user could listen
    on that name's other addresses and would receive the key.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return Access(url, "")
    host = parts.hostname or ""
    folder = state_dir() if home is None else home
    key = _read(key_file(folder, host, port))
    if not key and host in _SAME_HOST:
        key = _read(key_file(folder, _SAME_HOST[host], port))
        if key and host != _IPV4:
            url = parts._replace(netloc=f"{_IPV4}:{port}").geturl()
    return Access(url, key)


def _read(path: Path) -> str:
    """The key in a file; empty if it is not there, cannot be read, or could be read by others."""
    try:
        with path.open(encoding="ascii") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                return ""
            return file.read(1024).strip()
    except (OSError, ValueError):
        return ""
