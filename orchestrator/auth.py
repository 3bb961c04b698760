"""Who may ask: one token, compared in constant time, known to logs by its fingerprint (OR-12)."""

import hashlib
import hmac
from collections.abc import Mapping

from orchestrator.errors import Unauthenticated


class Authenticator:
    """Checks ``Authorization: Bearer`` and ``x-api-key``."""

    def __init__(self, token: str | None) -> None:
        """``None`` lets everybody in; settings only allow that on loopback."""
        self._expected = None if token is None else hashlib.sha256(token.encode()).digest()

    def check(self, headers: Mapping[str, str]) -> str:
        """The fingerprint of the token that came, empty when none is asked for.

        Raises ``Unauthenticated``.
        """
        if self._expected is None:
            return ""
        given = _token(headers)
        if given is None:
            raise Unauthenticated("a token is needed: send Authorization: Bearer or x-api-key")
        # Digests have one length, so that the comparison tells nothing about the token's.
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        if not hmac.compare_digest(digest, self._expected):
            raise Unauthenticated("the token is not the right one")
        return digest.hex()[:12]


def _token(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")
