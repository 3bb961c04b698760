"""Authentication by named keys, compared in constant time and logged by fingerprint (OR-12)."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.errors import Forbidden, Unauthenticated


def digest_of(token: str) -> bytes:
    """SHA-256 of a token. Its length is fixed, so comparing it does not reveal the token's."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Key:
    """The sender of a request. ``tenant`` is the default tenant."""

    tenant: str
    digest: bytes = field(default=b"", repr=False)
    names_tenants: bool = True
    """Whether the key may act for other tenants, as a gateway does."""
    is_admin: bool = False
    tells_time: bool = False
    """Whether the model is told the time left for a request. A request can override this."""

    @property
    def sees_tenants(self) -> bool:
        """Whether the key may see other tenants: operators may. Without keys, everybody may."""
        return self.is_admin or self == ANYBODY

    @property
    def fingerprint(self) -> str:
        """First 12 hex digits of the token's digest. Identifies the key in logs."""
        return self.digest.hex()[:12]

    def tenant_for(self, stated: str | None) -> str:
        """The tenant of a request. Raises ``Forbidden`` if the key may not name ``stated``."""
        if stated is None or stated == self.tenant:
            return self.tenant
        if not self.names_tenants:
            raise Forbidden(
                f"this key may only use the tenant {self.tenant}; leave tenant out, or use a key "
                "that may name tenants",
                field="tenant",
            )
        return stated


ANYBODY = Key("default")
"""The client of a service without keys. The settings allow such a service only on loopback."""
OPERATOR = Key("default", is_admin=True)
"""An operator of a service without keys. Like ``ANYBODY``'s, its requests belong to no key."""


NOBODY = Key("", names_tenants=False)
"""A caller without a valid key, on a path that does not need one."""


class Authenticator:
    """Checks ``Authorization: Bearer`` and ``x-api-key`` against all keys."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """Without keys, every client is accepted and none may operate the service."""
        self._keys = tuple(keys)
        self._operators = b""

    def let_operate(self, key: str) -> None:
        """Let ``key`` operate the service while the settings have no admin key."""
        self._operators = digest_of(key)

    def replace(self, keys: Iterable[Key]) -> None:
        """Replace all keys. Raises ``ValueError`` if the service has keys and ``keys`` is empty."""
        new = tuple(keys)
        if self._keys and not new:
            raise ValueError("removing all keys would let every client in; restart to do so")
        self._keys = new

    @property
    def has_keys(self) -> bool:
        """Whether requests need a token."""
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        """Whether the settings have an admin key."""
        return any(key.is_admin for key in self._keys)

    @property
    def has_several(self) -> bool:
        return len(self._keys) > 1

    @property
    def _operator(self) -> Key | None:
        """The key of ``let_operate``; None if there is none or the settings have an admin key."""
        is_used = self._operators and not self.has_admin
        return Key("operator", self._operators, is_admin=True) if is_used else None

    def check(self, headers: Mapping[str, str]) -> Key:
        """The key of the token in ``headers``. Raises ``Unauthenticated``."""
        given, operator = _token(headers), self._operator
        digest = b"" if given is None else digest_of(given)
        if operator is not None and hmac.compare_digest(digest, operator.digest):
            return operator if self._keys else OPERATOR
        if not self._keys:
            return ANYBODY
        if given is None:
            raise Unauthenticated("a token is required: send Authorization: Bearer or x-api-key")
        found = None
        for key in self._keys:  # compare all: the time must not reveal the matching key
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            raise Unauthenticated("the token is not valid; send the token of a configured key")
        return found

    def key_with(self, fingerprint: str) -> Key | None:
        """The key with that fingerprint; None if it no longer exists."""
        if not self._keys:
            return ANYBODY
        keys = filter(None, (self._operator, *self._keys))
        return next((key for key in keys if key.fingerprint == fingerprint), None)

    def require_admin(self, key: Key) -> None:
        """Raises ``Forbidden`` if ``key`` may not operate the service; ``Unauthenticated`` if the
        caller sent no key."""
        if key.is_admin:
            return
        if self.has_admin:
            raise Forbidden("this call needs an admin key; send it as Authorization: Bearer")
        if not self._operators:
            raise Forbidden(
                "nobody may operate this service: it has no admin key and could not write one to "
                "TIDEGATE_HOME (its log has the reason); set TIDEGATE_ADMIN_TOKEN"
            )
        # Anybody can read this message, so it must not contain a path of this machine.
        if self._keys:
            raise Forbidden(
                "this call needs the operators' key; the service keeps it in "
                "TIDEGATE_HOME/operator (or set TIDEGATE_ADMIN_TOKEN)"
            )
        raise Unauthenticated(
            "this call needs the operators' key as Authorization: Bearer; the key is in"
            " TIDEGATE_HOME/operator (on that machine, the command tidegate reads it itself)",
            field="Authorization",
        )


_OPEN_PATHS = ("/health", "/metrics")
"""Paths of probes and scrapers. They need no token and reveal nothing confidential. With an
operator's token, a scraper also sees tenants."""
_OPERATED = ("/v2/instances", "/v2/catalog")
"""Paths that every key may read and only operators may change."""
PAGE_FILES = "/page"
"""URL path below which the files of the page at ``/`` are served."""


def is_open_path(path: str) -> bool:
    """Whether a path is exempt from keys and limits."""
    return _is_at(path, _OPEN_PATHS)


def is_page(path: str) -> bool:
    """Whether a path belongs to the live page. The page asks for a key, so its files need none."""
    return path == "/" or path.startswith(f"{PAGE_FILES}/")


def is_admin_call(method: str, path: str) -> bool:
    """Whether a call changes or controls how the service runs."""
    is_change = method not in ("GET", "HEAD")
    return path.startswith("/admin/") or (is_change and _is_at(path, _OPERATED))


def _is_at(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _token(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")
