"""The journal's tables, and the migrations of files of earlier versions."""

import sqlite3
from typing import Final

FIRST: Final = 4
"""The version of 0.1.0. Files of earlier ones were never released; their records have another form,
and may be encrypted."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE tasks (
            n INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            key TEXT NOT NULL,
            idempotency_key TEXT,
            digest BLOB NOT NULL,
            accepted_unix REAL NOT NULL,
            deadline_unix_ms INTEGER NOT NULL,
            model TEXT NOT NULL,
            correlation_id TEXT NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            ended_unix REAL,
            outcome TEXT,
            finish_reason TEXT,
            code TEXT,
            completion_tokens INTEGER,
            -- When it arrived on a clock that nobody sets, and the boot that this clock belongs to.
            boot_id TEXT,
            arrived_boot_s REAL,
            -- When it ended by the clock of `ages`: the wall clock may be set while rows are kept.
            ended_age REAL
        )""",
        """CREATE UNIQUE INDEX tasks_by_idempotency_key ON tasks (key, idempotency_key)
            WHERE idempotency_key IS NOT NULL""",
        "CREATE INDEX tasks_that_live ON tasks (n) WHERE ended_unix IS NULL",
        # Rows beyond their age are found without a walk over everything.
        "CREATE INDEX tasks_by_age ON tasks (ended_age) WHERE ended_age IS NOT NULL",
        # Data that may not outlive a task's end has tables of its own, so that it can be removed.
        "CREATE TABLE requests (n INTEGER PRIMARY KEY, body BLOB NOT NULL)",
        """CREATE TABLE tokens (
            n INTEGER NOT NULL, first INTEGER NOT NULL, body BLOB NOT NULL,
            PRIMARY KEY (n, first)
        ) WITHOUT ROWID""",
        """CREATE TABLE results (
            n INTEGER PRIMARY KEY, ended_unix REAL NOT NULL, body BLOB, ended_age REAL
        )""",
        "CREATE INDEX results_by_age ON results (ended_age)",
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    ),
)
"""Statements that lead to each version from the one before, only ever appended to."""
VERSION = FIRST + len(MIGRATIONS) - 1


def version_of(db: sqlite3.Connection) -> int:
    """The file's version, 0 for a new one."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection) -> None:
    """Bring a file that is new, or of ``FIRST`` or later, up to ``VERSION``, each step in a
    transaction of its own."""
    for version in range(max(FIRST, version_of(db) + 1), VERSION + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in MIGRATIONS[version - FIRST]:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {version}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
