"""OR-5: a journal that fails refuses durable work and says so; other work continues; it heals."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tasks.journal import durable, file_store, store
from orchestrator.tasks.journal.records import Ended, Operation, StoredTokens, Tokens
from tests.orchestrator.tasks.journal.conftest import (
    Disk,
    Restarts,
    events_of,
    hold_writes,
    ready_of,
    submit,
    task_of,
)
from tests.support.fake_worker import FakeWorker, Plan


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


async def test_a_damaged_file_is_set_aside_while_running(
    restarts: Restarts, worker: FakeWorker, disk: Disk
) -> None:
    """What lives is in the new file, and continues from there."""
    worker.plan = lambda submit: Plan(stall_at=1)
    service = await restarts.start(worker)
    task_id = await task_of(service)
    disk.fail("SQLITE_CORRUPT", "database disk image is malformed")
    status, answer = await submit(service)
    assert status == 503 and "malformed" in answer["error"]["message"]
    disk.error = None
    await service.until(lambda: not service.journal.fault)
    (aside,) = await asyncio.to_thread(lambda: list(restarts.path.parent.glob("*.damaged-*Z")))
    assert (await ready_of(service))[1]["journal"]["set_aside"] == aside.name
    found = await asyncio.to_thread(rows, restarts.path, "SELECT id FROM tasks")
    assert found == [(task_id,)]
    await restarts.die()
    worker.plan = lambda submit: Plan()
    again = await restarts.start(worker)
    assert (await events_of(again, task_id))[-1].event == "end"


async def test_what_is_wrong_is_told_without_where(
    restarts: Restarts, worker: FakeWorker, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients have no use for the paths of the machine."""
    service = await restarts.start(worker)

    def fail(*args: Any) -> None:
        raise PermissionError(13, "Permission denied", str(restarts.path))

    with monkeypatch.context() as broken:
        broken.setattr(file_store.JournalWriter, "_write", fail)
        broken.setattr(file_store.JournalReader, "_look", fail)
        answer = (await submit(service))[1]
        _, look = await service.answer("GET", "/v2/tasks/0")
        told = str((await ready_of(service))[1])
    for text in (str(answer), str(look), told):
        assert "Permission denied" in text and str(restarts.path) not in text


async def test_a_fault_of_ours_does_not_stop_the_journal(
    restarts: Restarts, worker: FakeWorker, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await restarts.start(worker)

    def fail(*written: Any) -> None:
        raise TypeError("cannot be encoded")

    with monkeypatch.context() as broken:
        broken.setattr(file_store, "_insert", fail)
        status, answer = await submit(service)
        assert status == 503 and "internal error" in answer["error"]["message"]
        assert "cannot be encoded" not in str(answer), "it may tell what somebody asked for"
    await service.until(lambda: not service.journal.fault)
    await task_of(service)


async def test_numbers_that_no_disk_format_has_are_durable_too(
    restarts: Restarts, worker: FakeWorker
) -> None:
    """What a model makes of them fits; what a client wrote must not stop everybody's journal."""
    service = await restarts.start(worker)
    task_id = await task_of(service, top_k=2**70)
    assert not service.journal.fault
    assert (await events_of(service, task_id))[-1].event == "end"


async def test_a_record_that_cannot_be_written_takes_no_other_end_with_it(
    restarts: Restarts, worker: FakeWorker, disk: Disk
) -> None:
    """A task whose client was told of its end would run again after a restart."""
    service = await restarts.start(worker)
    held = worker.does(Plan(stall_at=1))
    task_id = await task_of(service)
    journal = service.journal
    commit = journal.writer._commit

    def with_another(operations: list[Operation]) -> None:
        if any(isinstance(one, Ended) for one in operations):
            journal.writer._commit = commit  # type: ignore[method-assign]
            bad = Tokens(99, 2**70, StoredTokens(b"", []))
            operations = [*operations, bad]
        commit(operations)

    journal.writer._commit = with_another  # type: ignore[method-assign]
    held.release.set()
    assert (await events_of(service, task_id))[-1].event == "end"
    await service.until(lambda: not journal.fault)
    ended = "SELECT count(*) FROM tasks WHERE ended_unix IS NOT NULL"
    assert await asyncio.to_thread(rows, restarts.path, ended) == [(1,)]


async def test_tidying_that_fails_or_hangs_stops_nothing(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours there leaves the thread alive; a disk that hangs there is seen as well."""
    monkeypatch.setattr(store, "TIDY_EVERY_S", 0.01)
    monkeypatch.setattr(store, "RETRY_S", 0.01)
    service = await restarts.start(worker)
    journal = service.journal
    ours = journal.writer
    remove_old, failed, go_on = file_store.remove_old, threading.Event(), threading.Event()

    def fail(*_: Any) -> int:
        failed.set()
        raise TypeError("no time")

    monkeypatch.setattr(file_store, "remove_old", fail)
    await asyncio.to_thread(failed.wait)
    monkeypatch.setattr(file_store, "remove_old", remove_old)
    tidied = ours._tidied
    await service.until(lambda: ours._tidied > tidied + 2 and not journal.fault)
    await task_of(service)

    def hang(*found: Any) -> int:
        go_on.wait()
        return remove_old(*found)

    monkeypatch.setattr(durable, "COMMIT_WAIT_S", 0.05)
    monkeypatch.setattr(file_store, "remove_old", hang)
    try:
        await service.until(lambda: "taken nothing" in journal.fault)
    finally:
        monkeypatch.setattr(file_store, "remove_old", remove_old)
        go_on.set()
    await service.until(lambda: not journal.fault)


async def test_a_disk_that_hangs_for_who_reads_does_not_hold_other_work(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await restarts.start(worker)
    go_on = threading.Event()

    def hang(self: Any, question: Any) -> None:
        go_on.wait()

    monkeypatch.setattr(file_store.JournalReader, "_look", hang)
    monkeypatch.setattr(store, "READ_WAIT_S", 0.05)
    try:
        assert (await submit(service, key="plain", durable=False))[0] == 202
        await service.ask("GET", "/v2/tasks/0", 503)
        monkeypatch.setattr(store, "READ_CLOSE_WAIT_S", 0.05)
        await service.parts.lifecycle.close()
    finally:
        go_on.set()


async def test_a_disk_that_hangs(
    restarts: Restarts, worker: FakeWorker, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission does not wait for ever, nor does a client that follows a task to its end."""
    service = await restarts.start(worker)
    held = worker.does(Plan(stall_at=1))
    task_id = await task_of(service)
    go_on = hold_writes(monkeypatch)
    monkeypatch.setattr(durable, "COMMIT_WAIT_S", 0.05)
    service.journal._give_up()  # the timer was set by the other limit
    status, answer = await submit(service, key="mine")
    assert status == 503 and answer["error"]["code"] == "journal_unavailable"
    assert "did not take it within 0.05 s" in answer["error"]["message"]
    held.release.set()
    assert (await events_of(service, task_id))[-1].event == "end"
    assert "taken nothing" in service.journal.fault
    monkeypatch.setattr(durable, "COMMIT_WAIT_S", 60.0)  # the disk of this machine may be slow
    go_on.set()
    await service.until(lambda: not service.journal.fault)
    await task_of(service, key="mine")


async def test_or26_a_submission_waits_for_the_disk_only_until_its_deadline(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await restarts.start(worker)
    worker.plan = lambda job: Plan(stall_at=1)
    go_on = hold_writes(monkeypatch)
    monkeypatch.setattr(durable, "COMMIT_WAIT_S", 60.0)
    status, answer = await submit(service, deadline_ms=200)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    go_on.set()
