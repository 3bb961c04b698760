"""One question to a service: prints its answer, or one line that says what to do."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from tidegate.cli import runtime
from tidegate.cli.interrupt import importing
from tidegate.cli.one_call import QuickClient
from tidegate.client import Client
from tidegate.errors import AuthFailed, ConnectFailed, DeadlineExceeded, NotFound, TidegateError
from tidegate.retries import NO_RETRIES

FAILED = 1


def ask(
    command: str,
    url: str,
    token: str | None,
    action: Callable[[Client], Awaitable[int]],
    *,
    operates: bool = False,
    streams: bool = False,
) -> int:
    """Run ``action`` with a client; returns the exit status. ``operates``: with the operators' key,
    where the service keeps one on this machine; ``streams``: for more than a call now and then."""
    if operates:
        url, token = _as_operator(url, token)

    async def run() -> int:
        # Whoever sits here sees what is wrong, and tries again by hand.
        kind = Client if streams else QuickClient
        async with kind(url, token=token, retries=NO_RETRIES) as client:
            return await action(client)

    try:
        return asyncio.run(run())
    except TidegateError as error:
        print(f"tidegate {command}: {advice(error)}", file=sys.stderr)
    except ValueError as error:  # a URL that is none
        print(f"tidegate {command}: {error}; see --url", file=sys.stderr)
    return FAILED


def _as_operator(url: str, token: str | None) -> tuple[str, str | None]:
    """URL and token to use for operators' calls, by the key on this machine where there is one."""
    with importing():
        runtime.add_to_path()
        from catalog.operator_key import access
    found = access(url)
    return found.url, found.key or token


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
