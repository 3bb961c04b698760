"""A file that is coming in."""

import asyncio
import secrets
from contextlib import suppress

from orchestrator.batches.folder import FILE_PREFIX, Appender
from orchestrator.batches.records import StoredFile
from orchestrator.batches.shop import Shop
from orchestrator.errors import BodyTooLarge, TidegateError


class Upload:
    """An upload: write to it, then ``finish``; ``close`` in any case."""

    def __init__(self, shop: Shop, owner: str) -> None:
        self.id = f"{FILE_PREFIX}{secrets.token_hex(16)}"
        self.bytes = 0
        self._shop = shop
        self._owner = owner
        self._appender: Appender | None = None
        self._is_kept = False

    async def write(self, content: bytes) -> None:
        """Append to the file. Raises ``BodyTooLarge`` above the bound of one file,
        ``JournalUnavailable`` where the folder or the disk is full."""
        self.bytes += len(content)
        most = self._shop.config.file_bytes
        if self.bytes > most:
            raise BodyTooLarge(
                f"a file must have at most {most} bytes; split it, a batch for each part",
                field="file",
            )
        await self._shop.disk(self._append, content)

    async def finish(self, name: str, purpose: str, keep_s: float) -> StoredFile:
        """Keep the data as a file that clients can ask for."""
        file = StoredFile(
            id=self.id,
            owner=self._owner,
            name=name,
            purpose=purpose,
            bytes=self.bytes,
            made=self._shop.time.stamp(),
            keep_s=min(keep_s, self._shop.config.keep_s),
        )
        await self._shop.disk(self._sync)
        await self._shop.disk(self._shop.folder.save, file)
        self._is_kept = True
        self._shop.files[file.id] = file
        return file

    async def close(self) -> None:
        """Remove the data unless it is kept."""
        if self._appender is not None and not self._is_kept:
            with suppress(TidegateError):
                await asyncio.shield(self._shop.disk(self._discard))

    def _append(self, content: bytes) -> None:
        self._shop.folder.require_room(len(content), is_upload=True)
        self._open().append(0, 0, content)

    def _sync(self) -> None:
        appender = self._open()
        appender.sync()
        appender.close()

    def _open(self) -> Appender:
        if self._appender is None:
            self._appender = self._shop.folder.writer(self.id)
        return self._appender

    def _discard(self) -> None:
        if self._appender is not None:
            self._appender.close()
        self._shop.folder.remove(self.id)
