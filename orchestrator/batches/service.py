"""Files and batches of one orchestrator, with operations for APIs."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import islice

import msgspec

from orchestrator.batches.folder import FILE_PREFIX, Folder, new_id
from orchestrator.batches.records import LineOutcome, Status, StoredBatch, StoredFile, Time
from orchestrator.batches.run import Run
from orchestrator.batches.section import BatchConfig
from orchestrator.batches.shop import Shop, Upload
from orchestrator.batches.window import Window
from orchestrator.clock import Boot, Clock
from orchestrator.errors import InvalidRequest, NotFound, NotReady, RateLimited, TidegateError
from orchestrator.telemetry.log import fields, service_log

MAX_WINDOW_S = 7 * 86_400.0
"""The longest ``completion_window``, in seconds."""
MAX_FILES_PER_KEY = 10_000
MAX_BATCHES_PER_KEY = 10_000
"""Most batches of a key, including ended ones."""
MAX_UNFINISHED_PER_KEY = 100
PRUNE_EVERY_S = 60.0
OPEN_WITHIN_S = 5.0
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PIECES_AT_ONCE = 16
"""Pieces of a file that the thread passes to the loop at a time: some hundred KiB of lines."""


class Batches:
    """All files and batches, on the event loop. ``shop.server`` must be set before ``start``."""

    def __init__(self, config: BatchConfig, clock: Clock, boot: Boot) -> None:
        self.config = config
        self._runs: dict[str, Run] = {}
        self._over: dict[str, StoredBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._upkeep: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()
        self.shop = Shop(
            config=config,
            folder=Folder(config),
            time=Time(clock, boot),
            thread=ThreadPoolExecutor(1, thread_name_prefix="tidegate-batches"),
            window=Window(config.window, self._most_of),
            files={},
        )

    def start(self) -> None:
        """Continue the batches of an earlier process."""
        self._upkeep = asyncio.create_task(self._keep_up(), name="batches")

    async def close(self) -> None:
        """Leave unfinished batches to the next process. Idempotent."""
        tasks = [*self._tasks, *([self._upkeep] if self._upkeep else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.shop.thread.shutdown(wait=False)

    @property
    def unfinished(self) -> int:
        return len(self._runs)

    @property
    def under_way(self) -> int:
        """Number of lines that are being served or wait for a retry."""
        window = self.shop.window
        return window.under_way.total() + window.resting.total()

    def outcomes(self) -> Counter[LineOutcome]:
        counts: Counter[LineOutcome] = Counter()
        for batch in self._all():
            counts.update({LineOutcome(kind): count for kind, count in batch.counts.items()})
        return counts

    async def _keep_up(self) -> None:
        while not self._is_open.is_set():
            try:
                await self._open()
            except OSError as error:
                service_log.error("cannot read the folder of batches; will retry: %s", error)
                await asyncio.sleep(OPEN_WITHIN_S)
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            try:
                await self.prune()
            except TidegateError as error:
                service_log.warning("cannot remove old batches: %s", error.message)

    async def _open(self) -> None:
        contents = await self.shop.block(self.shop.folder.open)
        self.shop.files.update(contents.files)
        for batch in contents.batches.values():
            if batch.status.is_over:
                self._over[batch.id] = batch
            else:
                self._begin(batch)
        if self._runs:
            service_log.info(
                "continuing batches of an earlier process", extra=fields(batches=len(self._runs))
            )
        self._is_open.set()

    async def _opened(self) -> None:
        """Wait until the records of an earlier process are read. Raises ``NotReady``."""
        try:
            async with asyncio.timeout(OPEN_WITHIN_S):
                await self._is_open.wait()
        except TimeoutError:
            raise NotReady("files and batches are not read yet; try again") from None

    def _begin(self, batch: StoredBatch) -> None:
        run = self._runs[batch.id] = Run(batch, self.shop)
        task = asyncio.create_task(self._follow(run), name=f"batch {batch.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, run: Run) -> None:
        await run.go()
        self._over[run.batch.id] = run.batch
        del self._runs[run.batch.id]

    def _most_of(self, owner: str) -> int:
        assert self.shop.server is not None
        return self.shop.server.most_at_once(owner)

    async def prune(self) -> None:
        time = self.shop.time
        for batch in list(self._over.values()):
            if batch.over is not None and time.age_s(batch.over) >= batch.keep_s:
                await self.shop.disk(self.shop.folder.remove, batch.id)
                self._over.pop(batch.id, None)
                for name in (batch.output_id, batch.errors_id):
                    await self._remove_file(name)
        in_use = {run.batch.input_id for run in self._runs.values()}
        for file in list(self.shop.files.values()):
            if file.id not in in_use and time.age_s(file.made) >= file.keep_s:
                await self._remove_file(file.id)

    async def _remove_file(self, name: str) -> None:
        await self.shop.disk(self.shop.folder.remove, name)
        self.shop.files.pop(name, None)

    # ── files ────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def upload(self, owner: str) -> AsyncIterator[Upload]:
        """Receive a file. If the block does not call ``finish``, the file is removed."""
        await self._opened()
        own = sum(file.owner == owner for file in self.shop.files.values())
        if own >= MAX_FILES_PER_KEY:
            raise RateLimited(
                f"this key has {own} files, which is the most; delete some", retryable=False
            )
        upload = Upload(self.shop, owner)
        try:
            await self.shop.disk(upload.open)
            yield upload
        finally:
            await upload.close()

    async def files(self, owner: str) -> list[StoredFile]:
        await self._opened()
        own = [file for file in self.shop.files.values() if file.owner == owner]
        return sorted(own, key=lambda file: (file.made.unix, file.id), reverse=True)

    async def file(self, owner: str, name: str) -> StoredFile:
        """A file of an owner. Raises ``NotFound``."""
        await self._opened()
        file = self.shop.files.get(name)
        if file is None or file.owner != owner:
            raise NotFound(f"there is no file {name[:64]!r}; files are kept only for a while")
        return file

    async def delete_file(self, owner: str, name: str) -> None:
        """Remove a file. Raises ``NotFound``, and ``InvalidRequest`` while a batch reads it."""
        file = await self.file(owner, name)
        for run in self._runs.values():
            if run.batch.input_id == file.id:
                raise InvalidRequest(
                    f"the batch {run.batch.id} reads this file; cancel the batch first, or wait",
                    field="file_id",
                )
        await self._remove_file(file.id)

    async def content(self, name: str) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces. Raises ``TidegateError`` if it cannot be read."""
        pieces = self.shop.folder.pieces(name)
        while piece := await self.shop.disk(lambda: b"".join(islice(pieces, _PIECES_AT_ONCE))):
            yield piece

    # ── batches ──────────────────────────────────────────────────────────────────────────────

    async def create(self, batch: StoredBatch) -> StoredBatch:
        """Start a batch from ``new_batch``. It is on disk when this returns."""
        await self._opened()
        own = [one for one in self._all() if one.owner == batch.owner]
        unfinished = sum(not one.status.is_over for one in own)
        if unfinished >= MAX_UNFINISHED_PER_KEY:
            raise RateLimited(
                f"{unfinished} batches of this key are unfinished, which is the most: wait for one"
            )
        if len(own) >= MAX_BATCHES_PER_KEY:
            raise RateLimited(
                f"{len(own)} batches of this key are kept, which is the most (they are removed "
                "seven days after their end)",
                retryable=False,
            )
        await self.shop.disk(self.shop.folder.save, batch)
        self._begin(batch)
        return batch

    async def batches(self, owner: str) -> list[StoredBatch]:
        await self._opened()
        own = [one for one in self._all() if one.owner == owner]
        return sorted(own, key=lambda one: (one.made.unix, one.id), reverse=True)

    async def batch(self, owner: str, name: str) -> StoredBatch:
        """A batch of an owner. Raises ``NotFound``."""
        await self._opened()
        run = self._runs.get(name)
        batch = self._over.get(name) if run is None else run.snapshot()
        if batch is None or batch.owner != owner:
            raise NotFound(f"there is no batch {name[:64]!r}; batches are kept only for a while")
        return batch

    async def cancel(self, owner: str, name: str) -> StoredBatch:
        batch = await self.batch(owner, name)
        run = self._runs.get(name)
        if run is None:
            raise InvalidRequest(f"the batch is {batch.status.value} and cannot be cancelled")
        await run.cancel()
        return run.snapshot()

    def _all(self) -> Iterator[StoredBatch]:
        yield from self._over.values()
        for run in self._runs.values():
            yield run.snapshot()


def new_batch(time: Time, **stated: object) -> StoredBatch:
    """A batch with new ids for its files. ``stated`` are its other fields."""
    output, errors = new_id(FILE_PREFIX), new_id(FILE_PREFIX)
    made = time.stamp()
    times = {Status.VALIDATING.value: int(made.unix)}
    return msgspec.convert(
        {**stated, "made": made, "output_id": output, "errors_id": errors, "times": times},
        StoredBatch,
    )


def read_window(text: str) -> float:
    """A ``completion_window`` in seconds: ``24h``, ``90m``, ``7d``. Raises ``InvalidRequest``."""
    number, unit = text[:-1], text[-1:]
    seconds = 0.0
    if number.isascii() and number.isdigit() and len(number) < 9 and unit in _UNIT_S:
        seconds = int(number) * _UNIT_S[unit]
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequest(
            "completion_window, the time limit of the batch, must be a number and one of s m h d, "
            "such as 24h, and at most 7d",
            field="completion_window",
        )
    return seconds
