"""Tidegate for Python people: a small asynchronous client.

::

    import asyncio
    from contextlib import aclosing
    from datetime import timedelta

    from tidegate import Client, Token

    async def main() -> None:
        async with Client("http://127.0.0.1:8080") as client:
            story = client.stream(
                "Once upon a time", max_tokens=64, deadline=timedelta(seconds=5)
            )
            async with aclosing(story) as events:  # leaving early cancels the work
                async for event in events:
                    if isinstance(event, Token):
                        print(event.text, end="", flush=True)

    asyncio.run(main())

``generate`` waits for the whole text; ``submit``, ``events``, ``status`` and ``cancel`` are the
native API call by call. Errors are one tree, drawn in ``tidegate.errors``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.client import Client, Message, Prompt, TaskOptions
    from tidegate.errors import (
        ApiError,
        AuthFailed,
        ConnectFailed,
        DeadlineExceeded,
        InvalidRequest,
        NotFound,
        ProtocolError,
        StreamLost,
        TaskCancelled,
        TidegateError,
        Unavailable,
    )
    from tidegate.results import (
        Budget,
        End,
        Event,
        Failed,
        Generation,
        Queued,
        Started,
        Submitted,
        TaskError,
        TaskStatus,
        Token,
        Usage,
    )

_MODULES: Final = ("tidegate.client", "tidegate.errors", "tidegate.results")


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for.

    The command ``tidegate`` lives in this package too, and must handle Ctrl-C from its first
    moment on: it cannot wait for aiohttp.
    """
    if name in __all__:
        for module in _MODULES:
            found: object = getattr(import_module(module), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ApiError",
    "AuthFailed",
    "Budget",
    "Client",
    "ConnectFailed",
    "DeadlineExceeded",
    "End",
    "Event",
    "Failed",
    "Generation",
    "InvalidRequest",
    "Message",
    "NotFound",
    "Prompt",
    "ProtocolError",
    "Queued",
    "Started",
    "StreamLost",
    "Submitted",
    "TaskCancelled",
    "TaskError",
    "TaskOptions",
    "TaskStatus",
    "TidegateError",
    "Token",
    "Unavailable",
    "Usage",
]
