"""HTTP calls, with retries if they can help within the deadline, and errors as exceptions."""

import math
import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tidegate import _clock
from tidegate.deadlines import due
from tidegate.errors import (
    ApiError,
    ConnectFailed,
    DeadlineExceeded,
    ProtocolError,
    TidegateError,
    error_class,
)

_CONNECT_S = 10.0
AFTER_DEADLINE_S = 1.0
"""Seconds to wait past a deadline for the server's own report of the miss."""
LONGEST_TASK_S = 1800.0
"""Maximum deadline in seconds (DL-1): no stream is silent for longer."""
_CALL_S = 30.0
"""Default timeout of one attempt in seconds: an answer without generated text is fast."""
jitter = random.Random()

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy of calls. Times are seconds.

    A call is retried if there was no answer, or if the server says that a retry can help
    (``x-should-retry``, else ``retryable`` in the error, else 429 and 503). The server may set the
    pause (``retry-after-ms``). Otherwise it is ``first_s``, doubled each time up to ``most_s``, and
    drawn at random between half and all of that. A pause never exceeds the deadline.
    """

    attempts: int = 3
    """Number of attempts after the first one; 0 never retries."""
    first_s: float = 0.2
    most_s: float = 5.0
    longest_hint_s: float = 60.0
    """Longest pause to accept from a server; if it asks for more, the call is not retried."""

    def pause_s(self, attempt: int, error: TidegateError) -> float | None:
        """Seconds before retry number ``attempt`` (from 0); None if there is no more."""
        if attempt >= self.attempts:
            return None
        if isinstance(error, ApiError):
            if not error.retryable:
                return None
            if error.retry_after_s is not None:
                hint = max(0.0, error.retry_after_s)
                return hint if hint <= self.longest_hint_s else None
        elif not isinstance(error, ConnectFailed):
            return None
        return min(self.first_s * 2.0**attempt, self.most_s) * jitter.uniform(0.5, 1.0)


NO_RETRIES = Retries(attempts=0)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request. An ``is_idempotent`` request has the same effect if it is sent twice.

    ``ends_at`` is its deadline on our clock; the header ``X-Timeout-Ms`` carries the time left.
    ``patience_s`` limits one attempt.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_idempotent: bool = True
    ends_at: float | None = None
    patience_s: float = _CALL_S


class Transport:
    """Connections to one orchestrator. Create and use it within one event loop.

    Raises ``ValueError`` for a malformed ``base_url``.
    """

    def __init__(self, base_url: str, token: str | None, retries: Retries) -> None:
        try:
            parts = urlsplit(base_url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # an invalid port
            is_one = False
        if not is_one:
            raise ValueError(
                f"{base_url!r} is not an address of a service: expected http://HOST:PORT"
            )
        self.base_url = base_url.rstrip("/")
        self._retries = retries
        self._fastest_s = 0.0
        """Seconds of the fastest answer: a retry with less time left cannot be in time."""
        self._session = aiohttp.ClientSession(
            # aiohttp's default limit of 100 would make a stream's cancel wait for other streams.
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(self, call: HttpCall, result: type[_T]) -> _T:
        """Send ``call``; returns the answer as ``result``. Raises ``TidegateError``."""
        body = await self.send(call)
        try:
            return msgspec.json.decode(body, type=result)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{call.method} {call.path}: unexpected body: {error}") from error

    async def get(self, path: str, result: type[_T]) -> _T:
        """Get ``path`` as ``result``, within the caller's block. Raises ``TidegateError``."""
        return await self.call(HttpCall("GET", path, ends_at=due().at), result)

    async def send(self, call: HttpCall) -> bytes:
        """Send ``call``, with retries; return the answer's body. Raises ``TidegateError``."""
        attempt = 0
        while True:
            began = _clock.now()
            try:
                async with self.open(call) as response:
                    body = await response.read()
                took = _clock.now() - began
                self._fastest_s = min(took, self._fastest_s or took)
                return body
            except TidegateError as error:
                pause_s = self._retries.pause_s(attempt, error)
                if isinstance(error, ConnectFailed) and error.is_sent and not call.is_idempotent:
                    pause_s = None
                ends_at = math.inf if call.ends_at is None else call.ends_at
                if pause_s is None or _clock.now() + pause_s + self._fastest_s >= ends_at:
                    raise
            await _clock.sleep(pause_s)
            attempt += 1

    @asynccontextmanager
    async def open(self, call: HttpCall) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open an answer to read as a stream. Raises ``TidegateError`` if the server refuses, or if
        the connection fails, during the read too."""
        headers, patience_s, what = dict(call.headers), call.patience_s, "no answer"
        if call.ends_at is not None:
            left_s = call.ends_at - _clock.now()
            headers["X-Timeout-Ms"] = str(round(left_s * 1000))
            patience_s = min(patience_s, max(left_s, 0.0) + AFTER_DEADLINE_S)
        try:
            async with self._session.request(
                call.method,
                self.base_url + call.path,
                json=call.body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=patience_s, sock_connect=_CONNECT_S),
            ) as response:
                if response.status >= 400:
                    raise _api_error(response, await response.read())
                what = "a broken answer"
                yield response
        except TidegateError:
            raise
        except TimeoutError as error:
            if call.ends_at is None or _clock.now() < call.ends_at:
                raise self._failed(what, error) from error
            raise DeadlineExceeded(
                f"the deadline passed before {self.base_url} answered", code="deadline_exceeded"
            ) from error
        except aiohttp.ClientError as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> ConnectFailed:
        unsent = aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
        message = f"{what} from {self.base_url}: {_reason(error)}"
        return ConnectFailed(message, is_sent=not isinstance(error, unsent))


def _reason(error: Exception) -> str:
    """Why a connection failed, without the names of libraries."""
    if isinstance(error, aiohttp.ClientSSLError):
        return "the TLS handshake failed; does it speak plain http?"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        # A resolver's error numbers are negative, and are not errno values.
        if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
        if cause.strerror:
            return cause.strerror
    return str(error) or type(error).__name__


def _api_error(response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    """The server's error response as an exception. Handles a proxy's HTML, too."""
    status, reason, headers = response.status, response.reason or "", response.headers
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parsed = None
    fields = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    if not isinstance(fields, dict):
        fields = {"message": body[:200].decode("utf-8", "replace") or reason}
    code = str(fields.get("code") or f"http_{status}")
    said = headers.get("x-should-retry", "").lower()
    by_default = fields.get("retryable", status in (429, 503))
    return error_class(code, status)(
        str(fields.get("message") or reason or code),
        code=code,
        status=status,
        retryable=said == "true" if said in ("true", "false") else bool(by_default),
        retry_after_s=_retry_after_s(headers),
        details={k: v for k, v in fields.items() if k not in ("code", "message", "retryable")},
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    with suppress(ValueError):
        if "retry-after-ms" in headers:
            return float(headers["retry-after-ms"]) / 1000
        if "retry-after" in headers:
            return float(headers["retry-after"])
    return None
