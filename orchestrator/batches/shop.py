"""Resources of all batches and uploads: folder, blocking thread, window, server of lines."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from orchestrator.batches.folder import FILE_PREFIX, Appender, Folder, new_id
from orchestrator.batches.records import (
    BatchLine,
    LineOutcome,
    LineResult,
    StoredBatch,
    StoredFile,
    Time,
)
from orchestrator.batches.section import BatchConfig
from orchestrator.batches.window import Window
from orchestrator.errors import BodyTooLarge, JournalUnavailable, NotFound, TidegateError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LineServer(Protocol):
    """Serves lines and formats their outcomes. Implemented by an API."""

    async def serve(self, batch: StoredBatch, line: BatchLine, due_at: float) -> LineResult:
        """Serve a line until ``due_at`` (seconds of the clock). Never raises ``TidegateError``."""

    def entry(
        self, batch: StoredBatch, line: BatchLine, kind: LineOutcome, answer: LineResult | None
    ) -> bytes:
        """A line's result for the batch's client: JSON and a newline. Without an ``answer`` the
        line was not served."""

    def most_at_once(self, owner: str) -> int:
        """Most lines of an owner in progress at once."""


@dataclass(slots=True)
class Shop:
    config: BatchConfig
    folder: Folder
    time: Time
    thread: Executor
    """The only thread for blocking calls."""
    window: Window
    files: dict[str, StoredFile]
    server: LineServer | None = None

    async def block(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, call, *args)

    async def disk(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Like ``block``, for a waiting client: raises ``TidegateError`` if the disk fails."""
        try:
            return await self.block(call, *args)
        except FileNotFoundError:
            raise NotFound("the file's content was removed from the service's disk") from None
        except OSError as error:
            why = error.strerror or "the disk failed"
            raise JournalUnavailable(
                f"files and batches cannot be read or written now; try again later: {why}"
            ) from error


class Upload:
    """An upload: ``open``, ``write``, then ``finish``; always ``close``."""

    def __init__(self, shop: Shop, owner: str) -> None:
        self.id = new_id(FILE_PREFIX)
        self.bytes = 0
        self._shop = shop
        self._owner = owner
        self._appender: Appender | None = None
        self._is_kept = False

    def open(self) -> None:
        """Create the file, on the thread: a client that leaves meanwhile leaves no open file."""
        self._appender = self._shop.folder.writer(self.id, self._owner)

    async def write(self, content: bytes) -> None:
        """Append to the file. Raises ``BodyTooLarge`` if the file becomes too large, and
        ``JournalUnavailable`` if the folder or the disk is full."""
        self.bytes += len(content)
        most = self._shop.config.file_bytes
        if self.bytes > most:
            raise BodyTooLarge(
                f"a file must have at most {most} bytes; split it and create a batch for each part",
                field="file",
            )
        await self._shop.disk(self._append, content)

    async def finish(self, name: str, purpose: str) -> StoredFile:
        """Keep the data as a file that clients can fetch."""
        file = StoredFile(
            id=self.id,
            owner=self._owner,
            name=name,
            purpose=purpose,
            bytes=self.bytes,
            made=self._shop.time.stamp(),
            keep_s=self._shop.config.keep_s,
        )
        assert self._appender is not None
        await self._shop.disk(self._appender.close)
        await self._shop.disk(self._shop.folder.save, file)
        self._is_kept = True
        self._shop.files[file.id] = file
        return file

    async def close(self) -> None:
        """Remove the data unless it is kept."""
        if not self._is_kept:
            with suppress(TidegateError):
                await asyncio.shield(self._shop.disk(self._discard))

    def _append(self, content: bytes) -> None:
        assert self._appender is not None
        self._shop.folder.require_room(self._owner, len(content), is_upload=True)
        self._appender.append(0, 0, content)

    def _discard(self) -> None:
        if self._appender is not None:
            self._appender.close(sync=False)
        self._shop.folder.remove(self.id)
