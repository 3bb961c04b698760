"""OR-5: two orchestrators never write one journal, also where somebody removes its files."""

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.tasks.journal import store
from orchestrator.tasks.journal.file import JournalConfig, JournalError, JournalLock, open_journal
from tests.orchestrator.tasks.journal.conftest import Restarts, events_of, ready_of, submit, task_of
from tests.support.fake_worker import FakeWorker, Plan


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def test_a_removed_lock_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = JournalLock(tmp_path / "journal.db")
    lock.require()
    assert not caplog.records
    beside = tmp_path / "journal.db.lock"
    beside.unlink()
    with pytest.raises(JournalError, match="belongs to another"):
        JournalLock(tmp_path / "journal.db")  # not in the moment before it is made anew either
    beside.unlink()
    lock.require()
    assert beside.read_text() == f"{os.getpid()}\n"
    assert "lock file was removed" in caplog.text
    beside.rename(tmp_path / "elsewhere")
    beside.write_text("")
    lock.require()
    with pytest.raises(JournalError, match=f"process {os.getpid()}"):
        JournalLock(tmp_path / "journal.db")
    lock.close()


async def test_an_orchestrator_that_lost_its_journal_never_writes_again(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were removed and another has made new ones by their names."""
    monkeypatch.setattr(store, "RETRY_S", 0.02)
    monkeypatch.setattr(store, "TIDY_EVERY_S", 1000.0)
    held = Plan(stall_at=0)
    worker.plan = lambda job: held
    service = await restarts.start(worker)
    task_id = await task_of(service)
    await asyncio.to_thread(remove, restarts.path)
    another = await asyncio.to_thread(open_journal, JournalConfig(restarts.path))
    status, answer = await submit(service)
    assert status == 503 and "another orchestrator has taken" in answer["error"]["message"]
    assert (await ready_of(service))[1]["status"] == "degraded"
    held.release.set()
    assert (await events_of(service, task_id))[-1].event == "end"
    await asyncio.to_thread(another.close)
    await task_of(service, durable=False)
    assert (await submit(service))[0] == 503

    def tasks() -> int:
        with closing(sqlite3.connect(restarts.path)) as db:
            return int(db.execute("SELECT count(*) FROM tasks").fetchone()[0])

    assert await asyncio.to_thread(tasks) == 0
