"""OR-5: whatever part of a journal reached the disk, it is read as of some whole transaction.

Every transaction's end is a prefix, and so is every byte of the log in between, which a crash of
the machine may leave: a torn page, or a record half written.
"""

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.journal.file import JournalConfig, open_journal
from orchestrator.tasks.journal.file_store import JournalWriter
from orchestrator.tasks.journal.records import (
    Accept,
    Ended,
    Operation,
    StoredRequest,
    StoredResult,
    StoredTokens,
    TaskRow,
    Tokens,
    pack_ids,
    unpack_ids,
)
from orchestrator.tasks.journal.store import WriterCalls
from protocol import FinishReason, Outcome, Sampling
from tests.support.jobs import make_job

CONFIG = settings(max_examples=12, deadline=None)


@dataclass
class Lives:
    """What is to be found: tasks that live with their tokens, and those that have ended."""

    live: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def copy(self) -> "Lives":
        return Lives({n: list(ids) for n, ids in self.live.items()}, set(self.ended))


def accept(n: int) -> Accept:
    row = TaskRow(n, f"task{n}", "", f"key{n}", b"", 1.0, 2, "m", "c", 3)
    sampling = Sampling(max_tokens=64, seed=n)
    job = make_job(sampling=sampling, deadline=Deadline(2.0, 2), arrived=1.0, durable=True)
    request = StoredRequest(
        job=job,
        token_ids=pack_ids([n, n + 1]),
        vocabulary=b"v",
        model_digest="d",
        cache_salt="",
        clock_offset=0.0,
    )
    return Accept(row, request)


def ended(n: int, ids: list[int]) -> Ended:
    result = StoredResult(
        ids=pack_ids(ids),
        texts=[str(one) for one in ids],
        logprobs=[],
        ending=Ending(Outcome.MET, FinishReason.LENGTH),
        error=None,
        cached_tokens=0,
        fitted_tokens=None,
        clamped_ms=None,
        start_wait_s=0.0,
        first_id_free=0,
    )
    return Ended(n, 5.0, len(ids), result)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[Operation], Lives]]:
    """Transactions, each with what is to be found after it."""
    lives, next_n, transactions = Lives(), 1, []
    for _ in range(draw(st.integers(1, 8))):
        operations: list[Operation] = []
        for _ in range(draw(st.integers(1, 4))):
            kinds = ["accept"] if not lives.live else ["accept", "tokens", "tokens", "ended"]
            kind = draw(st.sampled_from(kinds))
            if kind == "accept":
                operations.append(accept(next_n))
                lives.live[next_n] = []
                next_n += 1
                continue
            n = draw(st.sampled_from(sorted(lives.live)))
            ids = lives.live[n]
            if kind == "tokens":
                more = draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
                texts = [str(one) for one in more]
                operations.append(Tokens(n, len(ids), StoredTokens(pack_ids(more), texts)))
                ids += more
            else:
                operations.append(ended(n, lives.live.pop(n)))
                lives.ended.add(n)
        transactions.append((operations, lives.copy()))
    return transactions


def found_in(path: Path) -> Lives:
    opened = open_journal(JournalConfig(path))
    try:
        assert opened.set_aside is None
        assert all(one.request is not None for one in opened.unfinished)
        live = {one.row.n: unpack_ids(one.tokens.ids) for one in opened.unfinished}
        for one in opened.unfinished:
            assert one.tokens.texts == [str(token) for token in live[one.row.n]]
            assert opened.next_n > one.row.n
        return Lives(live, set(_ended(path)))
    finally:
        opened.close()


def _ended(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        query = "SELECT t.n FROM tasks t JOIN results r ON r.n = t.n WHERE t.ended_unix IS NOT NULL"
        assert not db.execute(
            "SELECT 1 FROM requests r JOIN tasks t ON t.n = r.n WHERE t.ended_unix IS NOT NULL"
        ).fetchall()
        return [n for (n,) in db.execute(query)]


@dataclass
class Written:
    """A journal's files after each transaction."""

    base: bytes
    log: bytes
    ends: list[int]
    """Of the log, after each transaction; before the first, first."""

    def cut(self, folder: Path, at: int, spoil: Callable[[bytes], bytes] = bytes) -> Path:
        """The files as they are when the log ends at a byte."""
        path = folder / "journal.db"
        path.write_bytes(self.base)
        Path(f"{path}-wal").write_bytes(spoil(self.log[:at]))
        return path


def written(folder: Path, history: list[tuple[list[Operation], Lives]]) -> Written:
    path = folder / "journal.db"
    opened = open_journal(JournalConfig(path))
    writer = JournalWriter(opened, WriterCalls(lambda: 0.0, print, print, lambda: []))
    log = Path(f"{path}-wal")
    writer._write([])
    base, ends = path.read_bytes(), [log.stat().st_size]
    for operations, _ in history:
        writer._write(operations)
        ends.append(log.stat().st_size)
    content = log.read_bytes()
    assert path.read_bytes() == base, "the log was not taken over yet"
    writer._disconnect()
    opened.close()
    return Written(base, content, ends)


@CONFIG
@given(histories(), st.data())
def test_a_torn_log_is_read_as_of_the_last_whole_transaction(
    history: list[tuple[list[Operation], Lives]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as dead:
        files = written(Path(folder), history)
        assert all(before < after for before, after in pairwise(files.ends))
        number = data.draw(st.integers(0, len(history) - 1))
        at = data.draw(st.integers(files.ends[number], files.ends[number + 1] - 1))
        expected = history[number - 1][1] if number else Lives()
        assert found_in(files.cut(Path(dead), at)) == expected
