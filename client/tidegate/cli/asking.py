"""One question to a service: prints its answer, or one line that says what to do.

The call of a command that asks once goes over a socket, with the standard library's parser: the
library of ``Transport`` takes a quarter of a second to import on a small machine, which is longer
than such a command takes otherwise. All but the plain case use it.
"""

import asyncio
import errno
import http.client
import io
import os
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from tidegate.cli.runtime import importing
from tidegate.client import Client
from tidegate.errors import AuthFailed, ConnectFailed, DeadlineExceeded, NotFound, TidegateError
from tidegate.transport import (
    CONNECT_S,
    NO_RETRIES,
    HttpCall,
    Retries,
    Transport,
    api_error,
    with_deadline,
)

FAILED = 1
_KEPT = "/?&=:;,+@!$'()*~%"
"""Characters that are not escaped in a path and its query."""


def ask(
    command: str,
    url: str,
    token: str | None,
    action: Callable[[Client], Awaitable[int]],
    *,
    operates: bool = False,
    streams: bool = False,
) -> int:
    """Run ``action`` with a client; returns the exit status. See ``arguments.asks``."""
    if operates:
        with importing(serving=True):
            from catalog.operator_key import access
        found = access(url)
        url, token = found.url, found.key or token

    async def run() -> int:
        # An interactive user sees the error and retries by hand.
        kind = Client if streams else QuickClient
        async with kind(url, token=token, retries=NO_RETRIES) as client:
            return await action(client)

    try:
        return asyncio.run(run())
    except TidegateError as error:
        print(f"{command}: {advice(error)}", file=sys.stderr)
    except ValueError as error:  # an invalid URL
        print(f"{command}: {error}; see --url", file=sys.stderr)
    return FAILED


def advice(error: TidegateError) -> str:
    """One line on what was wrong and what to do."""
    said = " ".join(str(error).split())
    if isinstance(error, ConnectFailed):
        return f"{said}; start a service with `tidegate up`, or name another with --url"
    if isinstance(error, AuthFailed):
        return f"{said}; give its token with --token or TIDEGATE_TOKEN"
    if isinstance(error, NotFound):
        return f"{said}; `tidegate tasks list` and `tidegate models` show what there is"
    if isinstance(error, DeadlineExceeded):
        return f"{said}; give it more time"
    return said


class QuickTransport(Transport):
    """A connection for each call; streams are read as ``Transport`` reads them."""

    async def exchange(self, call: HttpCall) -> bytes:
        url = urlsplit(self.base_url + call.path)
        headers, patience_s = with_deadline(call)
        headers |= self.credentials
        is_plain = url.scheme == "http" and "@" not in url.netloc and url.netloc.isascii()
        if not is_plain or not all(map(str.isprintable, headers.values())):
            return await super().exchange(call)
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
        except (OSError, TimeoutError) as error:
            if type(error) is not ConnectionRefusedError:
                return await super().exchange(call)  # by several addresses; in plain words
            reason = os.strerror(errno.ECONNREFUSED)
            raise ConnectFailed(f"no answer from {self.base_url}: {reason}") from error
        try:
            async with asyncio.timeout(patience_s):
                writer.write(_request(call, url, headers))
                received = await reader.read()
            answer = http.client.HTTPResponse(_Socket(received), method=call.method)  # type: ignore[arg-type]
            answer.begin()
            body = answer.read()
        except (OSError, TimeoutError, http.client.HTTPException) as error:
            raise self.no_answer(call, error) from error
        finally:
            writer.close()
        if 300 <= answer.status < 400:
            return await super().exchange(call)
        if answer.status >= 400:
            said = {name.lower(): value for name, value in answer.headers.items()}
            raise api_error(answer.status, answer.reason, said, body)
        return body


class QuickClient(Client):
    """A client for a call or two."""

    def _transport_to(self, base_url: str, token: str | None, retries: Retries) -> Transport:
        return QuickTransport(base_url, token, retries)


class _Socket(io.BytesIO):
    """Received bytes, in the shape that the standard library's parser reads."""

    def makefile(self, mode: str) -> io.BytesIO:
        return self


def _request(call: HttpCall, url: SplitResult, headers: dict[str, str]) -> bytes:
    body = b"" if call.body is None else msgspec.json.encode(call.body)
    if call.body is not None:
        headers["Content-Type"] = "application/json"
    if body or call.method != "GET":
        headers["Content-Length"] = str(len(body))
    target = quote(f"{url.path}?{url.query}" if url.query else url.path, safe=_KEPT)
    lines = [f"{call.method} {target} HTTP/1.1", f"Host: {url.netloc}", "Connection: close"]
    lines += (f"{name}: {value}" for name, value in headers.items())
    return "\r\n".join((*lines, "", "")).encode() + body
