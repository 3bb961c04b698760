"""Who may ask: named keys, compared in constant time, known to logs by fingerprint (OR-12)."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.errors import Forbidden, Unauthenticated

_OPERATED = ("/v2/instances", "/v2/catalog")
"""Reading is for every key, changing for operators."""
_ADMIN = "/admin"


def digest_of(token: str) -> bytes:
    """SHA-256 of a token. Digests have one length, so that a comparison tells nothing of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Key:
    """Who a request comes from. ``tenant`` is whose share it uses unless it names another."""

    tenant: str
    digest: bytes = field(default=b"", repr=False)
    names_tenants: bool = True
    """Whether it may speak for other tenants, as a gateway in front of us does."""
    is_admin: bool = False

    @property
    def sees_tenants(self) -> bool:
        """Whether it may know of other tenants: an operator does, and where there are no keys
        everybody is the same client."""
        return self.is_admin or self == ANYBODY

    @property
    def fingerprint(self) -> str:
        """The start of the token's digest: tells keys apart in logs, and gives none away."""
        return self.digest.hex()[:12]

    def tenant_for(self, stated: str | None) -> str:
        """Whose share to use. Raises ``Forbidden`` for a tenant that it may not name."""
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
"""Where no key is configured; settings only allow that on loopback."""
OPERATOR = Key("default", is_admin=True)
"""The same client with the operators' key: what it sends is as everybody's."""


NOBODY = Key("", names_tenants=False)
"""Who shows no key where one is not asked for."""


class Authenticator:
    """Checks ``Authorization: Bearer`` and ``x-api-key`` against every key there is."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """Without keys it lets everybody in, and nobody operate."""
        self._keys = tuple(keys)
        self._operators = b""
        self._kept_in = ""

    def let_operate(self, key: str, kept_in: str) -> None:
        """Whoever shows ``key`` operates the service while no key of the settings is an admin's.

        ``kept_in``: the file that has it, for whoever lacks it and may read there.
        """
        self._operators, self._kept_in = digest_of(key), kept_in

    def replace(self, keys: Iterable[Key]) -> None:
        """From now on these count. Raises ``ValueError`` where that would let everybody in."""
        new = tuple(keys)
        if self._keys and not new:
            raise ValueError("a service with keys goes on without any only after a restart")
        self._keys = new

    @property
    def has_keys(self) -> bool:
        """Whether anybody is asked for a token."""
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        """Whether a key of the settings is an admin's."""
        return any(key.is_admin for key in self._keys)

    @property
    def has_several(self) -> bool:
        """Whether there is anybody to share with."""
        return len(self._keys) > 1

    def check(self, headers: Mapping[str, str]) -> Key:
        """Whose token came. Raises ``Unauthenticated``."""
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
        for key in self._keys:  # all of them, so that the time does not tell which one fits
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            raise Unauthenticated("the token is not the right one")
        return found

    def key_with(self, fingerprint: str) -> Key | None:
        """The key of that fingerprint; None where there is none, or none any more."""
        if not self._keys:
            return ANYBODY
        if self._operators and not self.has_admin:
            operator = Key("operator", self._operators, is_admin=True)
            if operator.fingerprint == fingerprint:
                return operator
        return next((key for key in self._keys if key.fingerprint == fingerprint), None)

    def key_or_nobody(self, headers: Mapping[str, str]) -> Key:
        """Whose token came, where none is asked for."""
        try:
            return self.check(headers)
        except Unauthenticated:
            return NOBODY

    def require_admin(self, key: Key) -> None:
        """Raises ``Forbidden``, or ``Unauthenticated`` where no key has been asked for, unless the
        key may operate the service."""
        if key.is_admin:
            return
        if self.has_admin:
            raise Forbidden("this needs the admin key")
        if not self._operators:
            raise Forbidden(
                "nobody may operate this service: no admin key is configured (set "
                "TIDEGATE_ADMIN_TOKEN), and none could be kept in TIDEGATE_HOME, as its log says"
            )
        if self._keys:
            raise Forbidden(
                "this needs the operators' key, which the service keeps in TIDEGATE_HOME/operator "
                "(or set TIDEGATE_ADMIN_TOKEN)"
            )
        raise Unauthenticated(
            "this needs the operators' key as Authorization: Bearer; whoever runs the service "
            f"finds it in {self._kept_in} (the command tidegate reads it by itself)",
            field="Authorization",
        )


_OPEN_PATHS = ("/health", "/v1/health", "/v2/health", "/ping", "/metrics")
"""Probes and scrapers need no token, and learn nothing that one would protect. A scraper with an
operator's is told of tenants too."""


def is_open_path(path: str) -> bool:
    """Whether a path is exempt from keys and limits."""
    return any(path == p or path.startswith(f"{p}/") for p in _OPEN_PATHS)


PAGE_FILES = "/page"
"""What the page at ``/`` is made of lies below it."""


def is_page(path: str) -> bool:
    """Whether a path is the live page, or part of it: that asks for a key, so it needs none."""
    return path == "/" or path.startswith(f"{PAGE_FILES}/")


def is_admin_call(method: str, path: str) -> bool:
    """Whether a call is about how the service runs, rather than using it."""
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
