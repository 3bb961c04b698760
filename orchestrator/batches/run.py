"""The life cycle of one batch, from the check of its lines to its end::

    validating ─▶ in_progress ─▶ finalizing ─▶ completed, expired
        │              └─▶ cancelling ─▶ cancelled
        └─▶ failed

If a process dies at any point, the next process reads the batch's record and ledger and continues
with the lines without an entry. A line that was in progress is served again from the start: no
client has seen its output.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from orchestrator.batches.folder import Ledger
from orchestrator.batches.lines import BadLine, Check, RawLine, some_of, split_lines
from orchestrator.batches.records import (
    BatchLine,
    LineError,
    LineOutcome,
    Status,
    StoredBatch,
    StoredFile,
)
from orchestrator.batches.shop import Shop
from orchestrator.batches.window import WindowPlace
from orchestrator.telemetry.log import fields, service_log

_CHECKED_AT_ONCE = 500
_READ_AT_ONCE, _BYTES_AT_ONCE = 64, 2**20
_SWEPT_AT_ONCE = 500
_GRACE_S = 1.0
"""Seconds for lines in progress to report that the batch's deadline, also theirs, has passed."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
"""First and longest pause in seconds between tries of a line without room or a failing write."""

T = TypeVar("T")


class Run:
    """An unfinished batch. Call ``go`` once."""

    def __init__(self, batch: StoredBatch, shop: Shop) -> None:
        self.batch = batch
        self._shop = shop
        clock = shop.time.clock
        self._due_at = clock.now() + batch.window_s - shop.time.age_s(batch.made)
        self._ledger: Ledger | None = None
        self._why: LineOutcome | None = None
        """Why no more lines start; None while lines start."""
        self._next: WindowPlace | None = None
        """Place of the next line while it waits for the place."""
        self._stopped = asyncio.Event()
        self._failing = False
        self._saving = asyncio.Lock()

    def snapshot(self) -> StoredBatch:
        if self._ledger is None or self.batch.status.is_over:
            return self.batch
        counts = {int(kind): count for kind, count in self._ledger.counts.items()}
        return msgspec.structs.replace(self.batch, counts=counts)

    async def cancel(self) -> None:
        """Start no more lines, and end the lines in progress. Idempotent."""
        if self.batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
            await self._become(Status.CANCELLING)
            self._stop(LineOutcome.CANCELLED)

    async def go(self) -> None:
        """Run the batch until its end. The process cancels this when it ends."""
        clock = self._shop.time.clock
        timer = clock.call_at(self._due_at, lambda: self._stop(LineOutcome.EXPIRED))
        try:
            if self.batch.status is Status.CANCELLING:
                self._stop(LineOutcome.CANCELLED)
            elif self._due_at <= clock.now():
                self._stop(LineOutcome.EXPIRED)
            if not self.batch.total and not await self._check():
                return
            await self._end(await self._serve_all())
        except (BadLine, FileNotFoundError) as error:
            why = "was removed"
            if isinstance(error, BadLine):
                why = f"has changed: {error.error.message}"
            message = f"the batch cannot continue: its input file {why}"
            await self._fail("input_unreadable", message)
        except Exception:
            service_log.exception("a batch failed", extra=fields(batch=self.batch.id))
            await self._fail("internal", "an internal error occurred; see the service's log")
        finally:
            timer.cancel()

    async def _check(self) -> bool:
        """Check that all lines are valid requests of this batch. If not, the batch fails."""
        shop = self._shop
        check = Check(self._lines(), self.batch.endpoint, shop.config.max_lines)
        while await shop.block(check.step, _CHECKED_AT_ONCE):
            pass
        if check.errors:
            await self._end(Status.FAILED, errors=check.errors)
            return False
        await self._become(Status.IN_PROGRESS, total=check.total)
        return True

    async def _serve_all(self) -> Status:
        """Serve until every line has exactly one entry. Returns the final status."""
        shop = self._shop
        while True:
            self._ledger = ledger = await self._insist(lambda: Ledger(shop.folder, self.batch))
            try:
                if self._why is None:
                    await self._serve(ledger)
                if self._why is not None:
                    await self._sweep(ledger, self._why)
            except BaseException:
                with suppress(OSError):
                    await shop.block(ledger.close)
                raise
            await self._insist(ledger.close)
            if ledger.counts.total() == self.batch.total:
                break
            service_log.error(
                "entries of a batch are missing from its files; their lines are served again",
                extra=fields(batch=self.batch.id, missing=self.batch.total - ledger.counts.total()),
            )
            await asyncio.sleep(_LONGEST_PAUSE_S)
        await self._become(Status.FINALIZING)
        await self._publish(ledger)
        if self._why is LineOutcome.CANCELLED:
            return Status.CANCELLED
        # If all lines ended before the deadline, the batch is complete, even if detected later.
        return Status.EXPIRED if ledger.counts[LineOutcome.EXPIRED] else Status.COMPLETED

    async def _serve(self, ledger: Ledger) -> None:
        shop, lines = self._shop, self._lines()
        read = partial(some_of, lines, ledger.is_done, _READ_AT_ONCE, _BYTES_AT_ONCE)
        working: set[asyncio.Task[None]] = set()
        try:
            while some := await shop.block(read):
                for line in some:
                    place = await self._place()
                    if place is None:
                        break
                    task = asyncio.create_task(self._one(ledger, line, place), name="batch line")
                    working.add(task)
                    task.add_done_callback(working.discard)
                    # The task cannot do this itself: if it is cancelled at once, it never starts.
                    task.add_done_callback(lambda _, place=place: place.leave())  # type: ignore[misc]
                if self._why is not None:
                    break
            await self._until_idle(working)
        finally:
            left = list(working)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _lines(self) -> Iterator[RawLine]:
        pieces = self._shop.folder.pieces(self.batch.input_id)
        return split_lines(pieces, self._shop.config.line_bytes)

    async def _place(self) -> WindowPlace | None:
        """Wait for a place in the window; None if no more lines may start."""
        if self._why is not None:
            return None
        self._next = place = WindowPlace(self._shop.window, self.batch.owner, self._due_at)
        try:
            return place if await place.take() else None
        except asyncio.CancelledError:
            place.leave()
            raise
        finally:
            self._next = None

    async def _until_idle(self, working: set[asyncio.Task[None]]) -> None:
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            while working and not stopped.done():
                await asyncio.wait({stopped, *working}, return_when=asyncio.FIRST_COMPLETED)
            if working and self._why is LineOutcome.EXPIRED:
                await asyncio.wait(working, timeout=_GRACE_S)
        finally:
            stopped.cancel()

    async def _one(self, ledger: Ledger, line: BatchLine, place: WindowPlace) -> None:
        """Serve a line and write its outcome. Retries until the batch's deadline."""
        server = self._shop.server
        assert server is not None
        losses, pause = 0, _FIRST_PAUSE_S
        while True:
            answer = await server.serve(self.batch, line, self._due_at)
            losses += answer.is_loss
            if answer.retry_after_s is None or losses >= self._shop.config.attempts:
                break
            place.rest()
            await asyncio.sleep(max(answer.retry_after_s, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            await place.take()
        entry = server.entry(self.batch, line, answer.kind, answer)
        await self._insist(lambda: ledger.put(line.number, answer.kind, entry))

    async def _sweep(self, ledger: Ledger, kind: LineOutcome) -> None:
        """Write a "not served" entry for every line without one."""
        lines, server = self._lines(), self._shop.server
        assert server is not None

        def some() -> bool:
            found = some_of(lines, ledger.is_done, _SWEPT_AT_ONCE, _BYTES_AT_ONCE)
            for line in found:
                if not ledger.is_done(line.number):  # it has no entry from an earlier try
                    entry = server.entry(self.batch, line, kind, None)
                    ledger.put(line.number, kind, entry)
            return bool(found)

        while await self._insist(some):
            pass

    async def _publish(self, ledger: Ledger) -> None:
        """Make the batch's files available if they have content."""
        batch, shop = self.batch, self._shop
        for name, what in ((batch.output_id, "output"), (batch.errors_id, "errors")):
            if not ledger.bytes[name]:
                await shop.block(shop.folder.remove, name)
                continue
            file = StoredFile(
                id=name,
                owner=batch.owner,
                name=f"{batch.id}_{what}.jsonl",
                purpose="batch_output",
                bytes=ledger.bytes[name],
                made=shop.time.stamp(),
                keep_s=batch.keep_s,
            )
            await self._insist(partial(shop.folder.save, file))
            shop.files[name] = file

    def _stop(self, why: LineOutcome) -> None:
        if self._why is None:
            self._why = why
            self._stopped.set()
            if self._next is not None:
                self._next.give_up()

    async def _fail(self, code: str, message: str) -> None:
        """End the batch because it cannot continue. Results of ended lines stay available."""
        if self._ledger is not None:
            await self._publish(self._ledger)
        await self._end(Status.FAILED, errors=[LineError(code, message)])

    async def _end(self, status: Status, **changes: object) -> None:
        stamp = self._shop.time.stamp()
        await self._become(status, counts=self.snapshot().counts, over=stamp, **changes)
        service_log.info(
            "a batch has ended",
            extra=fields(
                batch=self.batch.id,
                status=status.value,
                lines=self.batch.total,
                succeeded=self.batch.count(LineOutcome.SUCCEEDED),
            ),
        )

    async def _become(self, status: Status, **changes: object) -> None:
        """Change the status, on disk first. A batch that is being cancelled stays so."""
        async with self._saving:
            before = self.batch
            if before.status is Status.CANCELLING and not status.is_over:
                status = Status.CANCELLING
            now = int(self._shop.time.clock.unix())
            times = {**before.times, status.value: before.times.get(status.value, now)}
            batch = msgspec.structs.replace(before, status=status, times=times, **changes)
            await self._insist(lambda: self._shop.folder.save(batch))
            self.batch = batch

    async def _insist(self, call: Callable[[], T]) -> T:
        """Run ``call``, which writes to disk, on the thread. Retries while the disk fails."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                done = await self._shop.block(call)
            except FileNotFoundError:
                raise
            except OSError as error:
                if not self._failing:
                    service_log.error(
                        "a batch waits for the disk",
                        extra=fields(batch=self.batch.id, error=error.strerror or str(error)),
                    )
                self._failing = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._failing = False
                return done
