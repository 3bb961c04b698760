"""Commands that ask a service: they print its answer, or one line that says what to do."""

import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import click

from tidegate.cli.arguments import json_option, server_options
from tidegate.cli.runtime import importing
from tidegate.errors import AuthFailed, ConnectFailed, DeadlineExceeded, NotFound, TidegateError

_ADVICE = {
    ConnectFailed: "start a service with `tidegate up`, or give another address with --url",
    AuthFailed: "give its token with --token or TIDEGATE_TOKEN",
    NotFound: "`tidegate tasks list` and `tidegate models` show what exists",
    DeadlineExceeded: "give it more time",
}


def asks(
    *, operates: bool = False
) -> Callable[[Callable[..., Awaitable[int]]], Callable[..., int]]:
    """Turn a function that takes a client into a command with ``--url``, ``--token`` and
    ``--json``. With ``operates`` it uses the operators' key, if the service keeps one here.
    """

    def decorate(function: Callable[..., Awaitable[int]]) -> Callable[..., int]:
        @wraps(function)
        def run(url: str, token: str | None, **given: Any) -> int:
            with importing(serving=operates):
                import asyncio

                from tidegate.client import Client
                from tidegate.transport import NO_RETRIES

                if operates:
                    from catalog.operator_key import access

                    url, key = access(url)
                    token = key or token

            async def ask() -> int:
                # An interactive user sees the error and can retry.
                async with Client(url, token=token, retries=NO_RETRIES) as client:
                    return await function(client, **given)

            try:
                return asyncio.run(ask())
            except TidegateError as error:
                hints = (hint for kind, hint in _ADVICE.items() if isinstance(error, kind))
                said = "; ".join((" ".join(str(error).split()), *hints))
            except ValueError as error:  # an invalid URL
                said = f"{error}; see --url"
            print(f"{click.get_current_context().command_path}: {said}", file=sys.stderr)
            return 1

        return server_options(json_option(run))

    return decorate
