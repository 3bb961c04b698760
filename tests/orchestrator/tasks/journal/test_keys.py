"""OR-5: the key of an encrypted journal is replaced, and nothing is lost by it."""

import asyncio
import base64
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from orchestrator.settings import InvalidSettings, load_settings
from orchestrator.tasks.journal import resealing, writer
from orchestrator.tasks.journal.file import JournalConfig, JournalFile, connect, open_journal
from orchestrator.tasks.journal.lock import JournalError
from orchestrator.tasks.journal.operations import Tokens
from orchestrator.tasks.journal.records import StoredTokens, pack_ids, unpack_ids
from orchestrator.tasks.journal.sealing import Sealer, WrongKey
from orchestrator.tasks.journal.terms import JournalTerms
from orchestrator.tasks.journal.writer import JournalWriter
from tests.orchestrator.conftest import Service
from tests.orchestrator.tasks.journal.conftest import Restarts, status_of, task_of
from tests.orchestrator.tasks.journal.test_prefixes import accept, ended
from tests.support.fake_worker import FakeWorker

pytest.importorskip("cryptography")

OLD, NEW, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
TABLES = ("requests", "tokens", "results")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def opened_with(path: Path, *keys: bytes) -> JournalFile:
    return open_journal(JournalConfig(path, JournalTerms(keys=keys)))


def writer_of(opened: JournalFile) -> JournalWriter:
    return JournalWriter(opened, lambda: 5.0, on_batch=print, on_fault=print, live=lambda: [])


def fill(path: Path, *keys: bytes, tasks: int = 3) -> None:
    """So many tasks that live, each with three tokens, and as many that have ended."""
    opened = opened_with(path, *keys)
    ours = writer_of(opened)
    for n in range(1, tasks + 1):
        ours._write([accept(n)])
        for first in (0, 2):
            texts = ["a", "b"] if first == 0 else ["c"]
            ids = [n] * len(texts)
            ours._write([Tokens(n, first, StoredTokens(pack_ids(ids), texts))])
        ours._write([accept(100 + n), ended(100 + n, [n])])
    ours._disconnect()
    opened.close()


def prefixes(path: Path) -> set[bytes]:
    with closing(sqlite3.connect(path)) as db:
        return {
            bytes(one)
            for table in TABLES
            for (one,) in db.execute(f"SELECT substr(body, 1, 5) FROM {table}")
        }


def reseal(path: Path, *keys: bytes, steps: int = 10**6) -> int:
    """As the writer's thread does, each step a tidy; how many there were."""
    opened = opened_with(path, *keys)
    ours, count = writer_of(opened), 0
    while not ours._resealing.is_over and count < steps:
        ours._tidy()
        count += 1
    ours._disconnect()
    opened.close()
    return count


def require_whole(path: Path, *keys: bytes, tasks: int = 3) -> None:
    opened = opened_with(path, *keys)
    assert [one.row.n for one in opened.unfinished] == list(range(1, tasks + 1))
    for one in opened.unfinished:
        assert one.request is not None and one.tokens.texts == ["a", "b", "c"]
        assert unpack_ids(one.tokens.ids) == [one.row.n] * 3
    with closing(connect(opened.config)) as db:
        for n, body in db.execute("SELECT n, body FROM results"):
            assert msgspec.msgpack.decode(opened.sealer.open(body, f"result {n}"))
    opened.close()


def test_the_first_key_seals_and_all_of_them_open() -> None:
    old, both, new = Sealer((OLD,)), Sealer((NEW, OLD)), Sealer((NEW,))
    assert both.open(old.seal(b"text", "a"), "a") == b"text"
    assert new.open(both.seal(b"text", "a"), "a") == b"text"
    with pytest.raises(WrongKey):
        old.open(both.seal(b"text", "a"), "a")
    with pytest.raises(WrongKey):  # another's place
        both.open(both.seal(b"text", "a"), "b")
    for cut in range(1, 40):
        with pytest.raises(WrongKey):
            both.open(both.seal(b"text", "a")[:cut] if cut < 36 else b"\x02" + OTHER, "a")


def test_what_was_sealed_before_keys_had_names_opens() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    stored = b"\x01" + bytes(12) + AESGCM(OLD).encrypt(bytes(12), b"text", b"a")
    assert Sealer((NEW, OLD)).open(stored, "a") == b"text"
    with pytest.raises(WrongKey, match="add it behind the first one"):
        Sealer((NEW,)).open(stored, "a")


@pytest.mark.parametrize("before", [(), (OLD,)])
def test_rows_are_sealed_anew_in_bounded_batches(
    path: Path,
    before: tuple[bytes, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resealing, "RESEAL_ROWS", 2)
    fill(path, *before)
    new = Sealer((NEW,)).prefix
    assert reseal(path, NEW, *before, steps=2) == 2  # then the process ends
    assert new in prefixes(path) and prefixes(path) != {new}
    require_whole(path, NEW, *before)
    assert "rows in plain text or of an earlier key" in caplog.text
    counted = [record for record in caplog.records if "earlier key" in record.message]
    assert vars(counted[0])["fields"]["rows"] == 12
    assert vars(counted[0])["fields"]["in_plain_text"] == (0 if before else 12)
    assert reseal(path, NEW, *before) > 5
    assert prefixes(path) == {new}
    require_whole(path, NEW)  # the old one may go
    caplog.clear()
    assert reseal(path, NEW) == 0
    assert not caplog.records


def test_a_key_that_is_lacking_ends_the_start_and_loses_nothing(path: Path) -> None:
    fill(path, OLD)
    reseal(path, NEW, OLD, steps=1)
    before = path.read_bytes()
    for keys in ((NEW,), (OTHER, NEW), ()):
        with pytest.raises(JournalError, match="TIDEGATE_JOURNAL__KEY"):
            opened_with(path, *keys)
    assert path.read_bytes() == before
    require_whole(path, NEW, OLD)


def test_a_row_that_no_key_opens_stays_and_stops_nothing(path: Path) -> None:
    fill(path, OLD)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE requests SET body = ? WHERE n = 2", (b"\x01" + bytes(40),))
        db.commit()
    reseal(path, NEW, OLD)
    opened = opened_with(path, NEW)
    assert [one.request is None for one in opened.unfinished] == [False, True, False]
    opened.close()
    with closing(sqlite3.connect(path)) as db:
        (body,) = db.execute("SELECT body FROM requests WHERE n = 2").fetchone()
    assert bytes(body) == b"\x01" + bytes(40)


async def until_told(service: Service, task_id: str) -> None:
    """Its end was committed before the process died, or it is made again."""
    while not str((await status_of(service, task_id))["text"]).startswith("w0 "):  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def test_a_service_takes_a_new_key(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own thread does it, and says when the old key may go."""
    monkeypatch.setattr(writer, "RESEAL_EVERY_S", 0.01)
    old, new = (base64.b64encode(key).decode() for key in (OLD, NEW))
    service = await restarts.start(worker, journal__key=old)
    task_id = await task_of(service)
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    await restarts.die()
    again = await restarts.start(worker, journal__key=f"{new},{old}")
    await until_told(again, task_id)
    journal = again.orchestrator.stages.durable
    assert journal is not None
    await again.until(lambda: journal._writer._resealing.is_over)
    await restarts.die()
    third = await restarts.start(worker, journal__key=new)
    await until_told(third, task_id)


def test_settings_that_name_several_keys(tmp_path: Path) -> None:
    journal = str(tmp_path / "j.db")
    old, new = (base64.b64encode(key).decode() for key in (OLD, NEW))
    assert load_settings(journal__path=journal, journal__key=f"{new}, {old}").journal.key
    with pytest.raises(InvalidSettings, match="the same key is there twice"):
        load_settings(journal__path=journal, journal__key=f"{new},{new}")
    with pytest.raises(InvalidSettings, match="expected 32 random bytes"):
        load_settings(journal__path=journal, journal__key=f"{new},")
