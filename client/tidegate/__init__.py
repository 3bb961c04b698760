# ruff: noqa: F403, F405 - a type checker finds the names in the modules that define them
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
    from tidegate.chats import *
    from tidegate.client import *
    from tidegate.deadlines import *
    from tidegate.errors import *
    from tidegate.following import *
    from tidegate.requests import *
    from tidegate.results import *
    from tidegate.sessions import *
    from tidegate.slots import *
    from tidegate.sync import *
    from tidegate.transport import *

_MODULES: Final = (
    "errors",
    "results",
    "deadlines",
    "requests",
    "transport",
    "sessions",
    "slots",
    "chats",
    "following",
    "client",
    "sync",
)
"""Modules that define the public names, ordered by import time, fastest first."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for. Raises ``AttributeError`` for others.

    The command ``tidegate`` is in this package too. It must handle Ctrl-C as soon as it starts, so
    it cannot wait for the import of aiohttp.
    """
    if name in __all__:
        for module in _MODULES:
            found: object = getattr(import_module(f"tidegate.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ApiError",
    "AuthFailed",
    "Budget",
    "ChatAnswer",
    "ChatDelta",
    "ChatMessage",
    "ChatOptions",
    "Client",
    "ConnectFailed",
    "Deadline",
    "DeadlineExceeded",
    "DeadlineScope",
    "End",
    "Event",
    "Failed",
    "Generation",
    "Instance",
    "InstanceSlot",
    "InvalidRequest",
    "Message",
    "ModelInfo",
    "NotFound",
    "Prompt",
    "ProtocolError",
    "Queued",
    "Quote",
    "QuotedChance",
    "Recipe",
    "Reservation",
    "Retries",
    "Session",
    "SessionInfo",
    "SessionList",
    "SlotCheck",
    "SlotEvent",
    "SlotFailed",
    "SlotLine",
    "SlotList",
    "SlotOptions",
    "SlotQueued",
    "SlotResult",
    "SlotStage",
    "SlotStatus",
    "SlotSubmitted",
    "Started",
    "Stream",
    "StreamLost",
    "Submitted",
    "SyncClient",
    "SyncSession",
    "SyncStream",
    "TaskCancelled",
    "TaskError",
    "TaskLine",
    "TaskList",
    "TaskOptions",
    "TaskStatus",
    "TidegateError",
    "Token",
    "ToolCall",
    "ToolCallDelta",
    "ToolDeadline",
    "ToolTimeout",
    "Unavailable",
    "Usage",
    "deadline",
    "remaining",
    "timeout_headers",
    "tool_deadline",
]
