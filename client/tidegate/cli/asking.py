"""Sends one request to a service; prints the answer, or one line that says what to do."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from tidegate.cli.runtime import importing
from tidegate.client import Client
from tidegate.errors import AuthFailed, ConnectFailed, DeadlineExceeded, NotFound, TidegateError
from tidegate.transport import NO_RETRIES

FAILED = 1


def ask(
    command: str,
    url: str,
    token: str | None,
    action: Callable[[Client], Awaitable[int]],
    *,
    operates: bool = False,
) -> int:
    """Run ``action`` with a client; returns the exit status. See ``arguments.asks``."""
    if operates:
        with importing(serving=True):
            from catalog.operator_key import access
        found = access(url)
        url, token = found.url, found.key or token

    async def run() -> int:
        # An interactive user sees the error and can retry.
        async with Client(url, token=token, retries=NO_RETRIES) as client:
            return await action(client)

    try:
        return asyncio.run(run())
    except TidegateError as error:
        print(f"{command}: {advice(error)}", file=sys.stderr)
    except ValueError as error:  # an invalid URL
        print(f"{command}: {error}; see --url", file=sys.stderr)
    return FAILED


def advice(error: TidegateError) -> str:
    """One line that says what was wrong and what to do."""
    said = " ".join(str(error).split())
    if isinstance(error, ConnectFailed):
        return f"{said}; start a service with `tidegate up`, or give another address with --url"
    if isinstance(error, AuthFailed):
        return f"{said}; give its token with --token or TIDEGATE_TOKEN"
    if isinstance(error, NotFound):
        return f"{said}; `tidegate tasks list` and `tidegate models` show what exists"
    if isinstance(error, DeadlineExceeded):
        return f"{said}; give it more time"
    return said
