"""Checks the tokens of callers that open a lane, drain the worker or send plain requests."""

import hmac

from pydantic import SecretStr

from worker.core import Clock
from worker.log import service_log

WARN_EVERY_S = 60.0
"""Minimum seconds between logged refusals, so that a client cannot fill the disk."""


class Secret:
    """A token that callers must send, or none. Compared in constant time, never logged."""

    def __init__(self, token: SecretStr | None, what: str, clock: Clock) -> None:
        """``what``: the action that needs the token, for log lines."""
        self._token = None if token is None else token.get_secret_value().encode()
        self.is_asked = token is not None
        self._what = what
        self._clock = clock
        self._warn_at = -float("inf")
        self._refused = 0

    def admits(self, shown: object) -> bool:
        """Whether ``shown`` is the token, or none is required. A refusal is counted and logged."""
        if self._token is None:
            return True
        given = shown.encode("utf-8", "surrogatepass") if isinstance(shown, str) else b""
        if hmac.compare_digest(given, self._token):
            return True
        self._refused += 1
        now = self._clock()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            service_log.warning("%s refused: wrong token (%d so far)", self._what, self._refused)
        return False
