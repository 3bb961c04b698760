"""Authentication by named keys, compared in constant time and logged by fingerprint (OR-12)."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.errors import Forbidden, Unauthenticated

_OPERATED = ("/v2/instances", "/v2/catalog")
"""Paths that every key may read, and only operators may change."""
_ADMIN = "/admin"


def digest_of(token: str) -> bytes:
    """SHA-256 of a token. All digests have one length, so a comparison reveals nothing about it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Key:
    """The sender of a request. ``tenant`` is the default tenant."""

    tenant: str
    digest: bytes = field(default=b"", repr=False)
    names_tenants: bool = True
    """Whether the key may act for other tenants, as a gateway in front of us does."""
    is_admin: bool = False
    tells_time: bool = False
    """Whether models are told how much time is left unless a request says otherwise."""

    @property
    def sees_tenants(self) -> bool:
        """Whether the key may see other tenants: an operator's may, and without keys all clients
        are one."""
        return self.is_admin or self == ANYBODY

    @property
    def fingerprint(self) -> str:
        """Start of the token's digest: tells keys apart in logs without revealing any."""
        return self.digest.hex()[:12]

    def tenant_for(self, stated: str | None) -> str:
        """The tenant whose share to use. Raises ``Forbidden`` for one that the key may not name."""
        if stated is None or stated == self.tenant:
            return self.tenant
        if not self.names_tenants:
            raise Forbidden(
                f"this key works for the tenant {self.tenant}; leave tenant out, or use a key "
                "that may name tenants",
                field="tenant",
            )
        return stated


ANYBODY = Key("default")
"""The client of a service without keys, which the settings only allow on loopback."""
OPERATOR = Key("default", is_admin=True)
"""``ANYBODY`` with the operators' key: its requests belong to no key."""


NOBODY = Key("", names_tenants=False)
"""A caller without a valid key, on a path that needs none."""


class Authenticator:
    """Checks ``Authorization: Bearer`` and ``x-api-key`` against all keys."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """Without keys every client is accepted, and none may operate the service."""
        self._keys = tuple(keys)
        self._operators = b""

    def let_operate(self, key: str) -> None:
        """Let ``key`` operate the service, while no key of the settings is an admin's."""
        self._operators = digest_of(key)

    def replace(self, keys: Iterable[Key]) -> None:
        """Replace all keys. Raises ``ValueError`` if that would accept every client."""
        new = tuple(keys)
        if self._keys and not new:
            raise ValueError("a service with keys can drop all of them only by a restart")
        self._keys = new

    @property
    def has_keys(self) -> bool:
        """Whether a token is required at all."""
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        """Whether a key of the settings is an admin's."""
        return any(key.is_admin for key in self._keys)

    @property
    def has_several(self) -> bool:
        """Whether there is more than one key."""
        return len(self._keys) > 1

    def check(self, headers: Mapping[str, str]) -> Key:
        """The key of the token in ``headers``. Raises ``Unauthenticated``."""
        given = _token(headers)
        if given is not None and self._operators and not self.has_admin:
            digest = digest_of(given)
            if hmac.compare_digest(digest, self._operators):
                return Key("operator", digest, is_admin=True) if self._keys else OPERATOR
        if not self._keys:
            return ANYBODY
        if given is None:
            raise Unauthenticated("a token is needed: send Authorization: Bearer or x-api-key")
        digest, found = digest_of(given), None
        for key in self._keys:  # all of them, so that the time does not reveal which one fits
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            raise Unauthenticated("the token is not the right one")
        return found

    def key_with(self, fingerprint: str) -> Key | None:
        """The key of that fingerprint; None where no such key exists any more."""
        if not self._keys:
            return ANYBODY
        if self._operators and not self.has_admin:
            operator = Key("operator", self._operators, is_admin=True)
            if operator.fingerprint == fingerprint:
                return operator
        return next((key for key in self._keys if key.fingerprint == fingerprint), None)

    def key_or_nobody(self, headers: Mapping[str, str]) -> Key:
        """The key of the token in ``headers``; ``NOBODY`` where that is missing or wrong."""
        try:
            return self.check(headers)
        except Unauthenticated:
            return NOBODY

    def require_admin(self, key: Key) -> None:
        """Raises ``Forbidden`` for a key that may not operate, ``Unauthenticated`` without one."""
        if key.is_admin:
            return
        if self.has_admin:
            raise Forbidden("this needs the admin key")
        if not self._operators:
            raise Forbidden(
                "nobody may operate this service: no admin key is configured (set "
                "TIDEGATE_ADMIN_TOKEN), and none could be kept in TIDEGATE_HOME, as its log says"
            )
        # Anybody may read this: no path of the machine in it.
        if self._keys:
            raise Forbidden(
                "this needs the operators' key, which the service keeps in TIDEGATE_HOME/operator "
                "(or set TIDEGATE_ADMIN_TOKEN)"
            )
        raise Unauthenticated(
            "this needs the operators' key as Authorization: Bearer; the service's operator finds"
            " it in TIDEGATE_HOME/operator (there the command tidegate reads it by itself)",
            field="Authorization",
        )


_OPEN_PATHS = ("/health", "/metrics")
"""Paths of probes and scrapers, which need no token and reveal nothing that one would protect. A
scraper with an operator's token is shown tenants too."""
_BELOW_OPEN_PATHS = tuple(f"{path}/" for path in _OPEN_PATHS)


def is_open_path(path: str) -> bool:
    """Whether a path is exempt from keys and limits."""
    return path in _OPEN_PATHS or path.startswith(_BELOW_OPEN_PATHS)


PAGE_FILES = "/page"
"""Folder of the files that the page at ``/`` consists of."""


def is_page(path: str) -> bool:
    """Whether a path is of the live page, which asks for a key and so needs none."""
    return path == "/" or path.startswith(f"{PAGE_FILES}/")


def is_admin_call(method: str, path: str) -> bool:
    """Whether a call is about how the service runs, rather than about using it."""
    if path.startswith(f"{_ADMIN}/"):
        return True
    if method in ("GET", "HEAD"):
        return False
    return any(path == each or path.startswith(f"{each}/") for each in _OPERATED)


def _token(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")
