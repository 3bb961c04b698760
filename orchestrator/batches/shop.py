"""Parts shared by all batches: the folder, the one thread that blocks, the window, the server of
lines."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from orchestrator.batches.config import BatchConfig
from orchestrator.batches.folder import Folder
from orchestrator.batches.records import (
    BatchLine,
    LineOutcome,
    LineResult,
    StoredBatch,
    StoredFile,
    Time,
)
from orchestrator.batches.window import Window
from orchestrator.errors import JournalUnavailable, NotFound

P = ParamSpec("P")
T = TypeVar("T")


class Server(Protocol):
    """Serves lines and words their outcomes: an API."""

    async def serve(self, batch: StoredBatch, line: BatchLine, due_at: float) -> LineResult:
        """Serve a line until ``due_at`` (seconds of the clock). Never raises ``TidegateError``."""

    def entry(
        self, batch: StoredBatch, line: BatchLine, kind: LineOutcome, answer: LineResult | None
    ) -> bytes:
        """A line's result for the batch's client: JSON with a newline behind it. Without an
        ``answer`` the line was not served."""

    def most_at_once(self, owner: str) -> int:
        """How many lines of an owner may be in progress."""


@dataclass(slots=True)
class Shop:
    """The parts that all runs share."""

    config: BatchConfig
    folder: Folder
    time: Time
    thread: Executor
    """The one thread for everything that blocks."""
    window: Window
    files: dict[str, StoredFile]
    server: Server | None = None

    async def block(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``call`` on the one thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, lambda: call(*args, **kwargs))

    async def disk(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``call`` on the one thread for a client who waits: raises ``TidegateError`` where the
        disk fails."""
        try:
            return await self.block(call, *args, **kwargs)
        except FileNotFoundError:
            raise NotFound("the file's content was removed from the service's disk") from None
        except OSError as error:
            why = error.strerror or "the disk failed"
            raise JournalUnavailable(
                f"files and batches cannot be read or written now: {why}"
            ) from error
