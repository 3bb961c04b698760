"""Batches over a server that answers at once, on a clock that a test moves."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.batches.records import BatchLine, LineOutcome, LineResult, StoredBatch
from orchestrator.batches.section import BatchConfig
from orchestrator.batches.service import Batches, new_batch, new_id, read_window
from orchestrator.clock import Boot
from tests.support.clock import ManualClock

URL = "/v1/chat/completions"
OWNER = "a-key"


def line_of(number: int, **changes: object) -> bytes:
    line = {"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": {"n": number}}
    return json.dumps(line | changes).encode() + b"\n"


def final(line: BatchLine) -> LineResult:
    """Every fifth line fails."""
    kind = LineOutcome.ERRORED if line.number % 5 == 0 else LineOutcome.SUCCEEDED
    return LineResult(kind, 200, "request", line.body)


@dataclass
class FakeServer:
    """Serves lines; ``plan`` is asked how."""

    plan: Callable[[BatchLine], Awaitable[LineResult]] | None = None
    most: int = 100
    served: Counter[int] = field(default_factory=Counter)
    under_way: int = 0
    most_under_way: int = 0

    async def serve(self, batch: StoredBatch, line: BatchLine, due_at: float) -> LineResult:
        self.served[line.number] += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            return final(line) if self.plan is None else await self.plan(line)
        finally:
            self.under_way -= 1

    def entry(
        self, batch: StoredBatch, line: BatchLine, kind: LineOutcome, answer: LineResult | None
    ) -> bytes:
        told = {"custom_id": line.custom_id, "line": line.number, "kind": kind.name}
        return msgspec.json.encode(told) + b"\n"

    def most_at_once(self, owner: str) -> int:
        return self.most


@dataclass
class Life:
    """One process's batches."""

    batches: Batches
    server: FakeServer
    clock: ManualClock

    async def upload(self, content: bytes, owner: str = OWNER) -> str:
        async with self.batches.upload(owner) as upload:
            if content:
                await upload.write(content)
            file = await upload.finish("requests.jsonl", "batch")
        return file.id

    async def create(
        self, content: bytes, window: str = "24h", owner: str = OWNER, **changes: object
    ) -> str:
        stated: dict[str, object] = {
            "id": new_id("batch_"),
            "owner": owner,
            "input_id": await self.upload(content, owner),
            "endpoint": URL,
            "window": window,
            "window_s": read_window(window),
            "keep_s": self.batches.config.keep_s,
            "metadata": {},
        }
        batch = await self.batches.create(new_batch(self.batches.shop.time, **(stated | changes)))
        return batch.id

    async def batch(self, name: str, owner: str = OWNER) -> StoredBatch:
        return await self.batches.batch(owner, name)

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)

    async def over(self, name: str, owner: str = OWNER) -> StoredBatch:
        while not (batch := await self.batch(name, owner)).status.is_over:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return batch

    async def entries(self, name: str, owner: str = OWNER) -> list[dict[str, Any]]:
        """Of the output file, then of the error file."""
        batch, found = await self.batch(name, owner), []
        for file in (batch.output_id, batch.errors_id):
            if file in self.batches.shop.files:
                assert (await self.batches.file(owner, file)).purpose == "batch_output"
                found += [json.loads(line) for line in (await self.text(file)).splitlines()]
        return found

    async def text(self, file: str) -> bytes:
        async with aclosing(self.batches.content(file)) as pieces:  # type: ignore[type-var]
            return b"".join([piece async for piece in pieces])


MakeLife = Callable[..., Awaitable[Life]]


@pytest.fixture
async def make_life(tmp_path: Path) -> AsyncIterator[MakeLife]:
    """Start batches; all end with the test."""
    made: list[Life] = []

    async def make(
        folder: Path | None = None,
        server: FakeServer | None = None,
        clock: ManualClock | None = None,
        boot_id: str = "a boot",
        **config: Any,
    ) -> Life:
        clock, server = clock or ManualClock(), server or FakeServer()
        values = BatchConfig(folder or tmp_path / "journal.db.batches", **config)
        batches = Batches(values, clock, Boot(boot_id, clock.now))
        batches.shop.server = server
        batches.start()
        life = Life(batches, server, clock)
        made.append(life)
        return life

    yield make
    for life in made:
        await life.batches.close()


@pytest.fixture
async def life(make_life: MakeLife) -> Life:
    return await make_life()


def copy(folder: Path, to: Path) -> None:
    """The folder as a process leaves it that is killed now."""
    for _ in range(20):
        try:
            shutil.copytree(folder, to)
        except shutil.Error:  # a file was renamed meanwhile, which no kill sees by half
            shutil.rmtree(to)
        else:
            return
    raise AssertionError(f"{folder} does not come to rest")
