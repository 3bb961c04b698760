"""A process that dies at any point: every line comes to exactly one entry (0 lost, 0 doubled)."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.batches.folder import read_frames
from orchestrator.batches.records import LineOutcome, Status
from orchestrator.batches.shop import Shop
from tests.orchestrator.batches.conftest import FakeServer, Life, MakeLife, copy, line_of

LINES = 7
CONTENT = b"".join(line_of(number) for number in range(1, LINES + 1))


class Death:
    """At the ``at``-th thing that is done to the disk: ``before`` it, ``after`` it, or ``torn``, as
    after it but for the last bytes of each file of entries."""

    def __init__(self, at: int, how: str, to: Path) -> None:
        self.at, self.how, self.to = at, how, to
        self.count = 0
        self.came = asyncio.Event()

    async def block(self, life: Life, real: Any, call: Callable[..., Any], *args: Any) -> Any:
        self.count += 1
        is_now = self.count == self.at
        if not (is_now and self.how == "before"):
            done = await real(life.batches.shop, call, *args)
        if is_now:
            await asyncio.to_thread(self._leave, life)
            self.came.set()
            await asyncio.Future()
        return done

    def _leave(self, life: Life) -> None:
        copy(life.batches.config.folder, self.to)
        if self.how != "torn":
            return
        for run in life.batches._runs.values():
            if run.batch.status is Status.FINALIZING:
                continue  # by then the entries are on the disk
            for name in (run.batch.output_id, run.batch.errors_id):
                data = self.to / f"{name}.data"
                if data.exists() and (content := data.read_bytes()):
                    data.write_bytes(content[: -min(3 + self.at, len(content))])


def done_in(folder: Path) -> set[int]:
    """Lines that have an entry there."""
    frames = [f for path in folder.glob("*.data") for f in read_frames(path)]
    return {frame.number for frame in frames if frame.number}


async def lives_and_dies(make_life: MakeLife, death: Death, monkeypatch: pytest.MonkeyPatch) -> str:
    """The batch's name; empty where it was over before."""
    real = Shop.block
    life = await make_life(death.to.with_name("first"), window=4)
    name = await life.create(CONTENT)
    if death.at == 0:
        await asyncio.to_thread(death._leave, life)
        death.came.set()
    else:

        async def block(shop: Shop, call: Callable[..., Any], *args: Any) -> Any:
            return await death.block(life, real, call, *args)

        monkeypatch.setattr(Shop, "block", block)
    while not death.came.is_set():
        if not life.batches.unfinished:
            name = ""
            break
        await asyncio.sleep(0)
    monkeypatch.setattr(Shop, "block", real)
    await life.batches.close()
    return name


def came_or_over(life: Life, death: Death) -> bool:
    return death.came.is_set() or (life.batches._is_open.is_set() and not life.batches.unfinished)


async def check(life: Life, name: str) -> None:
    batch = await life.over(name)
    entries = await life.entries(name)
    assert Counter(entry["line"] for entry in entries) == Counter(range(1, LINES + 1))
    assert {entry["custom_id"] for entry in entries} == {f"id-{n}" for n in range(1, LINES + 1)}
    assert batch.status is Status.COMPLETED
    counts = batch.total, batch.count(LineOutcome.SUCCEEDED), batch.count(LineOutcome.ERRORED)
    assert counts == (7, 6, 1)


@pytest.mark.parametrize(
    "how", ["torn", *(pytest.param(how, marks=pytest.mark.slow) for how in ("before", "after"))]
)
async def test_killed_at_every_point(
    make_life: MakeLife, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    at = 0
    while True:
        here = tmp_path / str(at)
        death = Death(at, how, here / "second")
        name = await lives_and_dies(make_life, death, monkeypatch)
        if not name:
            break
        done = await asyncio.to_thread(done_in, death.to)
        server = FakeServer()
        life = await make_life(death.to, server, window=4)
        await check(life, name)
        assert not done & set(server.served), "what was done is not served again"
        await life.batches.close()
        at += 1
    assert at > LINES, "there is a point for each line's entry at least"


async def test_killed_again_and_again(
    make_life: MakeLife, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life gets a little further than the one before."""
    real, name, folder = Shop.block, "", tmp_path / "0"
    for number in range(100):
        life = await make_life(folder, window=3)
        name = name or await life.create(CONTENT)
        death = Death(4 + number % 9, "torn", tmp_path / str(number + 1))

        async def block(
            shop: Shop, call: Any, *args: Any, life: Life = life, death: Death = death
        ) -> Any:
            return await death.block(life, real, call, *args)

        monkeypatch.setattr(Shop, "block", block)
        await life.until(partial(came_or_over, life, death))
        monkeypatch.setattr(Shop, "block", real)
        if not death.came.is_set():
            break
        await life.batches.close()
        folder = death.to
    await check(life, name)
