"""What becomes of a batch: its checks, deadline, cancellation, bounds, and whose it is."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.batches import run, service
from orchestrator.batches.folder import Folder, Ledger
from orchestrator.batches.records import (
    BatchLine,
    LineOutcome,
    LineResult,
    Status,
    StoredBatch,
    Time,
)
from orchestrator.batches.section import BatchConfig
from orchestrator.batches.service import new_batch
from orchestrator.clock import Boot
from orchestrator.errors import (
    BodyTooLarge,
    InvalidRequest,
    JournalUnavailable,
    NotFound,
    RateLimited,
)
from tests.orchestrator.batches.conftest import (
    OWNER,
    FakeServer,
    Life,
    MakeLife,
    copy,
    final,
    line_of,
)
from tests.support.clock import ManualClock


def lines(count: int) -> bytes:
    return b"".join(line_of(number) for number in range(1, count + 1))


@pytest.mark.parametrize(
    ("content", "code", "line", "said"),
    [
        (b"\n \n", "empty_file", None, "no requests"),
        (line_of(1) + b"{nonsense\n", "invalid_json_line", 2, "line 2: it is not a JSON object"),
        (b"\xff\n", "invalid_json_line", 1, "not a JSON object"),
        (line_of(1, custom_id=7), "invalid_request", 1, "custom_id"),
        (b"\n\n" + line_of(1) + b"\n" + line_of(1), "duplicate_custom_id", 5, "id-1"),
        (line_of(1, method="GET"), "invalid_method", 1, "POST"),
        (line_of(1, url="/v1/strange"), "mismatched_endpoint", 1, "/v1/strange"),
        (line_of(1, body=[1]), "missing_required_parameter", 1, "body must be an object"),
        (line_of(1) + line_of(2) * 1000, "line_too_long", 2, "TIDEGATE_HTTP__MAX_BODY_BYTES"),
        (lines(21), "too_many_requests", None, "more than 20 requests; split it"),
    ],
)
async def test_a_bad_file_fails_its_batch(
    make_life: MakeLife, content: bytes, code: str, line: int | None, said: str
) -> None:
    life = await make_life(max_lines=20, line_bytes=2000)
    if code == "line_too_long":
        content = content.replace(b"\n", b" ").replace(b"} ", b"}\n", 1)
    batch = await life.over(await life.create(content))
    assert batch.status is Status.FAILED and not life.server.served
    assert (batch.errors[0].code, batch.errors[0].line) == (code, line)
    assert said in batch.errors[0].message


async def test_every_line_has_one_entry_and_files_have_the_usual_end(life: Life) -> None:
    """A file need not end with a line break, and may have blank lines."""
    content = b"\n" + lines(9) + b"\r\n" + line_of(10).strip()
    name = await life.create(content)
    batch = await life.over(name)
    assert batch.status is Status.COMPLETED and batch.total == 10
    entries = await life.entries(name)
    assert {entry["custom_id"] for entry in entries} == {f"id-{n}" for n in range(1, 11)}
    assert [e["custom_id"] for e in entries if e["kind"] == "ERRORED"] == ["id-4", "id-9"]
    assert list(batch.times) == ["validating", "in_progress", "finalizing", "completed"]
    assert await life.text(batch.input_id) == content


async def test_no_more_lines_than_the_window_and_the_owner_allow(make_life: MakeLife) -> None:
    for window, most in ((3, 100), (100, 2)):
        server = FakeServer(most=most)
        life = await make_life(server=server, window=window)
        await life.over(await life.create(lines(20)))
        assert server.most_under_way == min(window, most)
        await life.batches.close()


async def test_the_batch_that_is_due_first_goes_first_and_owners_share(make_life: MakeLife) -> None:
    gate, order = asyncio.Event(), list[str]()

    async def plan(line: BatchLine) -> LineResult:
        await gate.wait()
        order.append(line.custom_id)
        return final(line)

    def of(who: str) -> bytes:
        return b"".join(line_of(n, custom_id=f"{who}-{n}") for n in range(1, 7))

    server = FakeServer(plan)
    life = await make_life(server=server, window=1)
    late = await life.create(of("late"), "2h")
    await life.until(lambda: server.under_way == 1)
    soon = await life.create(of("soon"), "1h")
    other = await life.create(of("other"), "3h", owner="another")
    waiting = life.batches.shop.window._waiting
    await life.until(
        lambda: {o: len(own) for o, own in waiting.items()} == {OWNER: 2, "another": 1}
    )
    gate.set()
    await life.over(late)
    assert (await life.batch(soon)).status is Status.COMPLETED
    assert (await life.over(other, "another")).status is Status.COMPLETED
    own = [who for who in order if not who.startswith("other")]
    assert own[0] == "late-1" and all(who.startswith("soon") for who in own[1:6])
    assert any(who.startswith("other") for who in order[:4])


@pytest.mark.parametrize("losses", [0, 2, 3])
async def test_a_line_is_tried_again_while_that_may_help(
    make_life: MakeLife, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """For as long as there is no room; an instance that was lost with it is asked for no more than
    the usual number of tries."""
    monkeypatch.setattr(run, "_FIRST_PAUSE_S", 0.001)
    server = FakeServer()

    async def plan(line: BatchLine) -> LineResult:
        refused = LineResult(LineOutcome.ERRORED, 503, "", b"{}", 0.0, is_loss=bool(losses))
        return refused if server.served[line.number] <= (losses or 7) else final(line)

    server.plan = plan
    life = await make_life(server=server, attempts=3)
    name = await life.create(lines(1))
    batch = await life.over(name)
    assert batch.count(LineOutcome.SUCCEEDED) == (losses < 3)
    assert server.served[1] == {0: 8, 2: 3, 3: 3}[losses]


async def test_what_waits_for_another_try_keeps_nobody_else_out(make_life: MakeLife) -> None:
    """An owner at its limits may have all places for as long as nobody else wants one."""
    server = FakeServer()

    async def plan(line: BatchLine) -> LineResult:
        is_refused = line.custom_id.startswith("limited")
        return (
            LineResult(LineOutcome.ERRORED, 429, "", b"{}", 3600.0) if is_refused else final(line)
        )

    server.plan = plan
    life = await make_life(server=server, window=3)
    limited = b"".join(line_of(n, custom_id=f"limited-{n}") for n in range(1, 20))
    name = await life.create(limited)
    window = life.batches.shop.window
    await life.until(lambda: window.resting.total() == 3)
    other = await life.create(lines(10), owner="another")
    assert (await life.over(other, "another")).status is Status.COMPLETED
    assert server.served.total() == 13 and life.batches.under_way == 3
    await life.batches.cancel(OWNER, name)
    assert (await life.over(name)).counts == {LineOutcome.CANCELLED: 19}
    assert life.batches.under_way == 0


async def stuck(make_life: MakeLife, monkeypatch: pytest.MonkeyPatch) -> tuple[Life, str]:
    """A batch of ten lines, four of which are done; two more will never be."""
    monkeypatch.setattr(run, "_GRACE_S", 0.01)

    async def plan(line: BatchLine) -> LineResult:
        if line.number > 4:
            await asyncio.Future()
        return final(line)

    life = await make_life(server=FakeServer(plan), window=2)
    name = await life.create(lines(10), "1h")
    await life.until(lambda: life.server.under_way == 2 and life.server.served[6] == 1)
    return life, name


async def test_at_its_deadline_what_is_done_is_kept_and_the_rest_expires(
    make_life: MakeLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, name = await stuck(make_life, monkeypatch)
    life.clock.advance(3599)
    await asyncio.sleep(0.05)
    assert (await life.batch(name)).status is Status.IN_PROGRESS
    life.clock.advance(2)
    batch = await life.over(name)
    assert batch.status is Status.EXPIRED
    assert batch.counts == {LineOutcome.SUCCEEDED: 4, LineOutcome.EXPIRED: 6}
    assert sorted(e["line"] for e in await life.entries(name)) == list(range(1, 11))
    assert not life.server.under_way and not life.batches.under_way


async def test_it_expires_also_while_nobody_runs(
    make_life: MakeLife, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window continues: by the machine's own clock, and after a restart by the wall's."""
    life, name = await stuck(make_life, monkeypatch)
    await life.batches.close()
    for number, boot_id in enumerate(("a boot", "another boot")):
        folder = tmp_path / str(number)
        await asyncio.to_thread(copy, life.batches.config.folder, folder)
        clock = type(life.clock)()
        clock.advance(life.clock.now() - clock.now() + 3601)
        again = await make_life(folder, FakeServer(), clock, boot_id=boot_id)
        batch = await again.over(name)
        assert batch.status is Status.EXPIRED and not again.server.served
        assert batch.counts == {LineOutcome.SUCCEEDED: 4, LineOutcome.EXPIRED: 6}


async def test_files_are_bounded_and_private(make_life: MakeLife) -> None:
    life = await make_life(file_bytes=2**14, folder_bytes=2**15)
    with pytest.raises(BodyTooLarge, match="at most 16384 bytes"):
        await life.upload(bytes(2**14 + 1))
    kept = [await life.upload(bytes(2**13)) for _ in range(2)]
    with pytest.raises(JournalUnavailable, match=r"this key.*TIDEGATE_BATCHES__FOLDER_BYTES"):
        await life.upload(bytes(2**13))

    def look() -> tuple[int, set[int]]:
        paths = list(life.batches.config.folder.iterdir())
        return len(paths), {path.stat().st_mode & 0o777 for path in paths}

    assert await asyncio.to_thread(look) == (4, {0o600})
    for name in kept:
        await life.batches.delete_file(OWNER, name)
    assert life.batches.shop.folder.used_bytes == 0
    assert await asyncio.to_thread(look) == (0, set())
    await life.upload(bytes(2**13))


async def test_or24_a_key_leaves_room_for_the_files_of_others(make_life: MakeLife) -> None:
    """Also in the process that finds what an earlier one left."""
    life, size = await make_life(folder_bytes=2**17), 2**12

    async def uploaded(life: Life, owner: str) -> bool:
        try:
            await life.upload(bytes(size), owner)
        except JournalUnavailable:
            return False
        return True

    loud = [await uploaded(life, "loud") for _ in range(40)]
    assert loud == sorted(loud, reverse=True) and 16 < sum(loud) < 24
    assert await uploaded(life, "calm")
    await life.batches.close()
    later = await make_life(life.batches.config.folder, folder_bytes=2**17)
    assert not await uploaded(later, "loud") and await uploaded(later, "calm")


async def test_a_full_disk_delays_and_loses_nothing(
    make_life: MakeLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_LONGEST_PAUSE_S", 0.001)
    life = await make_life(window=4)
    write, is_full = os.write, True

    def full(file: int, content: bytes) -> int:
        if is_full and b'"kind"' in bytes(content):
            write(file, bytes(content)[:5])  # a part still fits
            raise OSError(28, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(os, "write", full)
    name = await life.create(lines(10))
    await life.until(lambda: life.server.served.total() == 4 and not life.server.under_way)
    await asyncio.sleep(0.02)
    assert life.server.served.total() == 4, "what waits for the disk holds its place"
    is_full = False
    assert (await life.over(name)).status is Status.COMPLETED
    assert sorted(e["line"] for e in await life.entries(name)) == list(range(1, 11))


async def test_input_that_is_removed_under_a_batch_fails_it(
    make_life: MakeLife, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reason, and with what was done until then."""
    life, name = await stuck(make_life, monkeypatch)
    batch = await life.batch(name)
    with pytest.raises(InvalidRequest, match=name):
        await life.batches.delete_file(OWNER, batch.input_id)
    await life.batches.close()
    folder = life.batches.config.folder
    await asyncio.to_thread((folder / f"{batch.input_id}.data").unlink)
    again = await make_life(folder)
    batch = await again.over(name)
    assert batch.status is Status.FAILED
    assert (batch.errors[0].code, batch.counts) == ("input_unreadable", {LineOutcome.SUCCEEDED: 4})
    assert len(await again.entries(name)) == 4


async def test_files_and_batches_go_when_their_time_is_over(make_life: MakeLife) -> None:
    life = await make_life(keep_s=7200.0)
    name = await life.create(lines(3))
    batch = await life.over(name)
    life.clock.advance(7100)
    await life.batches.prune()
    assert len(await life.batches.files(OWNER)) == 2
    life.clock.advance(101)
    await life.batches.prune()
    assert await life.batches.files(OWNER) == []
    for gone in (life.batch(name), life.batches.file(OWNER, batch.output_id)):
        with pytest.raises(NotFound):
            await gone
    left = await asyncio.to_thread(lambda: list(life.batches.config.folder.iterdir()))
    assert left == [] and life.batches.shop.folder.used_bytes == 0


async def test_an_upload_that_breaks_off_leaves_nothing(make_life: MakeLife) -> None:
    """Neither at once nor, where the process died with it, after the next start."""
    life = await make_life()
    with pytest.raises(RuntimeError):
        async with life.batches.upload(OWNER) as upload:
            await upload.write(b"half")
            raise RuntimeError
    folder = life.batches.config.folder
    assert await asyncio.to_thread(lambda: list(folder.iterdir())) == []
    for name in ("file-cut.data", "file-cut.record.new"):
        await asyncio.to_thread((folder / name).write_bytes, b"half")
    again = await make_life(folder)
    assert await again.batches.files(OWNER) == []
    assert await asyncio.to_thread(lambda: list(folder.iterdir())) == []


async def test_one_owner_has_so_many_at_most(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_FILES_PER_KEY", 2)
    monkeypatch.setattr(service, "MAX_BATCHES_PER_KEY", 1)
    await life.over(await life.create(lines(1)))
    with pytest.raises(RateLimited, match="2 files"):
        await life.upload(lines(1))
    monkeypatch.setattr(service, "MAX_FILES_PER_KEY", 9)
    with pytest.raises(RateLimited, match="1 batches"):
        await life.create(lines(1))


@pytest.fixture
def batch() -> StoredBatch:
    clock = ManualClock()
    return new_batch(
        Time(clock, Boot("a boot", clock.now)),
        id="batch_1",
        owner="a-key",
        input_id="file-input",
        endpoint="/v1/completions",
        window="24h",
        window_s=86_400.0,
        keep_s=86_400.0,
        metadata={},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(BatchConfig(tmp_path / "batches"))


def test_no_file_stays_open_when_the_other_cannot_be_opened(
    folder: Folder, batch: StoredBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again while the disk is full, so it would run out of files."""
    open_file = os.open

    def full(path: Any, *args: Any) -> int:
        if batch.errors_id in str(path):
            raise OSError(28, "No space left on device")
        return open_file(path, *args)

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                Ledger(folder, batch)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    Ledger(folder, batch).close()
