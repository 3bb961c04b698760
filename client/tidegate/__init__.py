# ruff: noqa: F403 - a type checker finds the names in the modules that define them
"""Tidegate's Python client: small, asynchronous or synchronous.

::

    from tidegate import SyncClient, Token

    with SyncClient("http://127.0.0.1:8080") as client:
        with client.stream("Once upon a time", max_tokens=64) as events:  # leaving cancels the work
            for event in events:
                if isinstance(event, Token):
                    print(event.text, end="", flush=True)

    import asyncio
    from tidegate import Client, deadline

    async def main() -> None:
        async with Client("http://127.0.0.1:8080") as client:
            with deadline(10):  # seconds, for all calls in here together
                outline = await client.generate("Outline a story about a fox.")
                story = await client.generate(f"Write it: {outline.text}", on_deadline="partial")

    asyncio.run(main())

``generate`` waits for the whole text. ``submit``, ``events``, ``status`` and ``cancel`` map to the
calls of the native API. All errors form one class tree, shown in ``tidegate.errors``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.client import *
    from tidegate.deadlines import *
    from tidegate.errors import *
    from tidegate.following import *
    from tidegate.requests import *
    from tidegate.results import *
    from tidegate.sessions import *
    from tidegate.sync import *
    from tidegate.transport import *

_NAMES: Final = {
    "client": "Client",
    "deadlines": "Deadline DeadlineScope ToolDeadline deadline remaining timeout_headers"
    " tool_deadline",
    "errors": "ApiError AuthFailed ConnectFailed DeadlineExceeded InvalidRequest NotFound"
    " ProtocolError StreamLost TaskCancelled TidegateError ToolTimeout Unavailable",
    "following": "Stream",
    "requests": "Message Prompt Quote QuotedChance Reservation TaskOptions",
    "results": "Budget End Event Failed Generation Instance InstanceSlot ModelInfo Queued Started"
    " Submitted TaskError TaskLine TaskList TaskStatus Token Usage",
    "sessions": "Session SessionInfo SessionList",
    "sync": "SyncClient SyncSession SyncStream",
    "transport": "Retries",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Module of each public name."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for. Raises ``AttributeError`` for others.

    The command ``tidegate`` is in this package too. It must handle Ctrl-C as soon as it starts, so
    it cannot wait for the import of aiohttp.
    """
    if name in _MODULES:
        return getattr(import_module(f"tidegate.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
