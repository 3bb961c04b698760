"""OR-5: who may open a journal, and what is done with one that is old, new, foreign or damaged."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from orchestrator.settings import InvalidSettings, load_settings
from orchestrator.tasks.journal import store
from orchestrator.tasks.journal.file import (
    VERSION,
    JournalConfig,
    JournalError,
    JournalLock,
    connect,
    open_journal,
    set_aside,
)
from orchestrator.tasks.journal.file_store import write
from orchestrator.tasks.journal.records import StoredTokens, Tokens, pack_ids
from tests.orchestrator.tasks.journal.conftest import Restarts, events_of, ready_of, submit, task_of
from tests.orchestrator.tasks.journal.test_prefixes import accept
from tests.support.fake_worker import FakeWorker, Plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "journal.db"


def test_nobody_else_may_read_it(path: Path) -> None:
    old = os.umask(0)
    try:
        opened = open_journal(JournalConfig(path))
    finally:
        os.umask(old)
    with closing(connect(JournalConfig(path))) as db:
        db.execute("INSERT INTO meta VALUES ('a', x'00')")  # makes the log next to it
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA secure_delete").fetchone() == (1,)
    assert set(modes.values()) == {0o600} and "journal.db-wal" in modes
    assert path.parent.stat().st_mode & 0o777 == 0o700
    opened.close()


def test_two_orchestrators_never_share_one(path: Path) -> None:
    first = open_journal(JournalConfig(path))
    with pytest.raises(JournalError, match=f"another orchestrator.*process {os.getpid()}"):
        open_journal(JournalConfig(path))
    first.close()
    open_journal(JournalConfig(path)).close()


def test_a_lock_that_is_a_link_is_not_followed(path: Path) -> None:
    """Somebody else may have put it there, to have a file of ours emptied."""
    mine = path.parent.parent / "mine"
    mine.write_text("kept")
    path.parent.mkdir()
    path.with_name("journal.db.lock").symlink_to(mine)
    with pytest.raises(JournalError, match="symbolic links"):
        open_journal(JournalConfig(path))
    assert mine.read_text() == "kept"


def test_who_else_reads_it_takes_nothing_away(path: Path) -> None:
    """A backup, or a shell, that closes the file must not delete the log that is written to."""
    config = JournalConfig(path)
    opened = open_journal(config)
    look = (
        "import sqlite3, sys; d = sqlite3.connect(sys.argv[1])\n"
        "print(d.execute(sys.argv[2]).fetchall()); d.close()"
    )
    command = [sys.executable, "-c", look, str(path), "SELECT name FROM meta ORDER BY name"]
    with closing(connect(config)) as db:
        db.execute("INSERT INTO meta VALUES ('a', x'00')")
        connect(config).close()  # as when a task is looked up
        subprocess.run(command, check=True, capture_output=True)
        db.execute("INSERT INTO meta VALUES ('b', x'00')")
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found == "[('a',), ('b',)]\n"
    opened.close()


def test_one_from_a_backup_is_readable_to_nobody_else(path: Path) -> None:
    open_journal(JournalConfig(path)).close()
    path.chmod(0o644)
    open_journal(JournalConfig(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("version", [4, 99])
def test_another_version_is_refused(path: Path, version: int) -> None:
    open_journal(JournalConfig(path)).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(JournalError, match=f"version {version}, and this Tidegate knows {VERSION}"):
        open_journal(JournalConfig(path))
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.damaged-*"))


@pytest.mark.parametrize("damage", ["not a database", "pages"])
def test_a_damaged_file_is_set_aside(path: Path, damage: str) -> None:
    open_journal(JournalConfig(path)).close()
    content = path.read_bytes()
    if damage == "pages":
        content = content[:4096] + random.Random(1).randbytes(len(content) - 4096)
    else:
        content = b"once upon a time " * 1000
    path.write_bytes(content)
    opened = open_journal(JournalConfig(path))
    assert opened.set_aside is not None and opened.set_aside.read_bytes() == content
    assert opened.unfinished == [] and opened.next_n == 1
    opened.close()
    again = open_journal(JournalConfig(path))
    assert again.set_aside is None
    again.close()


def test_a_file_that_is_set_aside_takes_its_log_along(path: Path) -> None:
    open_journal(JournalConfig(path)).close()
    log = Path(f"{path}-wal")
    log.write_bytes(b"what was not taken over yet")
    aside = set_aside(path)
    assert Path(f"{aside}-wal").read_bytes() == b"what was not taken over yet"
    assert aside.exists() and not path.exists() and not log.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(JournalError, match=r"Not a directory|File exists"):
        open_journal(JournalConfig(tmp_path / "file" / "journal.db"))


def halved(record: object, ids: str) -> bytes:
    """A record with half a token id."""
    fields = msgspec.to_builtins(record, builtin_types=(bytes,))
    return msgspec.msgpack.encode(fields | {ids: b"abc"})


@pytest.mark.parametrize("damage", ["cut short", "half a token id"])
@pytest.mark.parametrize("table", ["requests", "tokens"])
def test_a_damaged_record_costs_its_own_task_only(path: Path, table: str, damage: str) -> None:
    config = JournalConfig(path)
    opened = open_journal(config)
    with closing(connect(config)) as db:
        tokens = [Tokens(n, 0, StoredTokens(pack_ids([n]), ["a"])) for n in (1, 2)]
        write(db, [accept(1), accept(2), *tokens])
        bad = {"requests": (accept(1).request, "token_ids"), "tokens": (tokens[0].tokens, "ids")}
        body = halved(*bad[table]) if damage == "half a token id" else b"\x01"
        db.execute(f"UPDATE {table} SET body = ? WHERE n = 1", (body,))
    opened.close()
    again = open_journal(config)
    first, second = again.unfinished
    assert (first.request is None) is (table == "requests")
    assert len(first.tokens.texts) == (table == "requests")
    assert second.request is not None and second.tokens.texts == ["a"]
    again.close()


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    journal = str(tmp_path / "j.db")
    with pytest.raises(
        InvalidSettings, match="TIDEGATE_JOURNAL__LOSS_WINDOW_MS: needs TIDEGATE_JOURNAL"
    ):
        load_settings(journal__loss_window_ms=1.0)
    with pytest.raises(InvalidSettings, match=r"TIDEGATE_JOURNAL__KEEP_RESULTS_S: .*604800"):
        load_settings(journal__path=journal, journal__keep_results_s=1e6)
    assert load_settings(journal__path="").journal.path is None


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def test_a_removed_lock_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = JournalLock(tmp_path / "journal.db")
    lock.require()
    assert not caplog.records
    beside = tmp_path / "journal.db.lock"
    beside.unlink()
    with pytest.raises(JournalError, match="belongs to another"):
        JournalLock(tmp_path / "journal.db")  # not in the moment before it is made again either
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
    held = worker.does(Plan(stall_at=0))
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
