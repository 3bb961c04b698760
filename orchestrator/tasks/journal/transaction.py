"""The SQL of the journal's transactions."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.tasks.journal.operations import Accept, Ended, Operation, Tokens
from orchestrator.tasks.journal.packed import pack
from orchestrator.tasks.journal.records import COLUMNS

TIDY_ROWS = 2000
"""Most rows removed at a time, lest submissions wait for it."""

_INSERT = (
    f"INSERT INTO tasks ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (n) DO NOTHING"
)


def write(db: sqlite3.Connection, operations: Sequence[Operation], age: float) -> None:
    """Write all operations in one transaction, or none. A task's operations keep their order.
    ``age`` is now, on the clock of retention."""
    db.execute("BEGIN IMMEDIATE")
    # Comes first, because a client that was refused may have come again under the same name.
    refused = {one.n for one in operations if isinstance(one, Ended) and not one.is_accepted}
    if refused:
        db.executemany(
            "UPDATE tasks SET idempotency_key = NULL WHERE n = ?", [(n,) for n in refused]
        )
    accepted = (one for one in operations if isinstance(one, Accept))
    _insert(db, [_nameless(one) if one.row.n in refused else one for one in accepted])
    db.executemany(
        "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)",
        [(one.n, one.first, pack(one.tokens)) for one in operations if isinstance(one, Tokens)],
    )
    _end(db, [one for one in operations if isinstance(one, Ended)], age)
    if not operations:  # tests whether the disk takes anything
        db.execute("INSERT OR REPLACE INTO meta VALUES ('looked', ?)", (b"",))
    db.execute("COMMIT")


def _insert(db: sqlite3.Connection, accepted: Sequence[Accept]) -> None:
    if not accepted:
        return
    db.executemany(_INSERT, [[getattr(one.row, name) for name in COLUMNS] for one in accepted])
    db.executemany(
        "INSERT OR IGNORE INTO requests VALUES (?, ?)",
        [(one.row.n, pack(one.request)) for one in accepted if one.request is not None],
    )


def _end(db: sqlite3.Connection, ended: Sequence[Ended], age: float) -> None:
    """End the tasks that have not ended: whichever end is first counts."""
    if not ended:
        return
    numbers = [(one.n,) for one in ended]
    # Comes first: a full disk takes the rest where these were.
    db.executemany("DELETE FROM requests WHERE n = ?", numbers)
    db.executemany("DELETE FROM tokens WHERE n = ?", numbers)
    db.executemany(
        "INSERT OR IGNORE INTO results (n, ended_unix, ended_age, body) "
        "SELECT n, ?, ?, ? FROM tasks WHERE n = ? AND ended_unix IS NULL",
        [(one.ended_unix, age, pack(one.result), one.n) for one in ended],
    )
    db.executemany(
        "UPDATE tasks SET ended_unix = ?, ended_age = ?, outcome = ?, finish_reason = ?, code = ?, "
        "completion_tokens = ?, idempotency_key = iif(?, idempotency_key, NULL) "
        "WHERE n = ? AND ended_unix IS NULL",
        [
            (
                one.ended_unix,
                age,
                one.result.outcome.value,
                one.result.finish_reason.value,
                None if one.result.error is None else one.result.error.code.value,
                one.completion_tokens,
                one.is_accepted,
                one.n,
            )
            for one in ended
        ],
    )


def remove_old(db: sqlite3.Connection, results_before: float, tasks_before: float) -> int:
    """Remove rows that ended before these times, on the clock of ``write``, up to a bound; returns
    how many."""
    db.execute("BEGIN IMMEDIATE")
    removed = db.execute(
        "DELETE FROM results WHERE n IN "
        "(SELECT n FROM results WHERE ended_age < ? ORDER BY ended_age LIMIT ?)",
        (results_before, TIDY_ROWS),
    ).rowcount
    removed += db.execute(
        "DELETE FROM tasks WHERE n IN "
        "(SELECT n FROM tasks WHERE ended_age < ? ORDER BY ended_age LIMIT ?)",
        (tasks_before, TIDY_ROWS),
    ).rowcount
    db.execute("COMMIT")
    return removed


def _nameless(accept: Accept) -> Accept:
    return replace(accept, row=replace(accept.row, idempotency_key=None))
