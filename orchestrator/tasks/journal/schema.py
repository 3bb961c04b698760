"""The journal's tables, and the migrations of files of earlier versions.

``user_version`` of the file counts the migrations that it has had. They are only ever appended to.
"""

import sqlite3

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
            completion_tokens INTEGER
        )""",
        """CREATE UNIQUE INDEX tasks_by_idempotency_key ON tasks (key, idempotency_key)
            WHERE idempotency_key IS NOT NULL""",
        "CREATE INDEX tasks_that_live ON tasks (n) WHERE ended_unix IS NULL",
        # Data that may not outlive a task's end has tables of its own, so that it can be removed.
        "CREATE TABLE requests (n INTEGER PRIMARY KEY, body BLOB NOT NULL)",
        """CREATE TABLE tokens (
            n INTEGER NOT NULL, first INTEGER NOT NULL, body BLOB NOT NULL,
            PRIMARY KEY (n, first)
        ) WITHOUT ROWID""",
        "CREATE TABLE results (n INTEGER PRIMARY KEY, ended_unix REAL NOT NULL, body BLOB)",
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    ),
    (
        # Rows beyond their age are found without a walk over everything.
        "CREATE INDEX tasks_by_end ON tasks (ended_unix) WHERE ended_unix IS NOT NULL",
        "CREATE INDEX results_by_end ON results (ended_unix)",
    ),
    (
        # When a task arrived on a clock that nobody sets, and the boot that this clock belongs to.
        "ALTER TABLE tasks ADD COLUMN boot_id TEXT",
        "ALTER TABLE tasks ADD COLUMN arrived_boot_s REAL",
        # When it ended by the clock of ``ages``: the wall clock may be set while rows are kept.
        "ALTER TABLE tasks ADD COLUMN ended_age REAL",
        "ALTER TABLE results ADD COLUMN ended_age REAL",
        "UPDATE tasks SET ended_age = min(ended_unix, CAST(strftime('%s', 'now') AS REAL)) "
        "WHERE ended_unix IS NOT NULL",
        "UPDATE results SET ended_age = min(ended_unix, CAST(strftime('%s', 'now') AS REAL))",
        "DROP INDEX tasks_by_end",
        "DROP INDEX results_by_end",
        "CREATE INDEX tasks_by_age ON tasks (ended_age) WHERE ended_age IS NOT NULL",
        "CREATE INDEX results_by_age ON results (ended_age)",
    ),
    (
        # Records began with a byte that said whether they were encrypted: 0, for they were not.
        "UPDATE requests SET body = substr(body, 2)",
        "UPDATE tokens SET body = substr(body, 2)",
        "UPDATE results SET body = substr(body, 2)",
    ),
)
VERSION = len(MIGRATIONS)


def version_of(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def is_encrypted(db: sqlite3.Connection) -> bool:
    """Whether a file of an earlier version was encrypted: it has something to recognize its key
    by."""
    found = db.execute("SELECT 1 FROM meta WHERE name GLOB 'key_probe*' LIMIT 1").fetchone()
    return found is not None


def migrate(db: sqlite3.Connection, version: int = VERSION) -> None:
    """Bring a file up to ``version``, each step in a transaction of its own."""
    for number in range(version_of(db), version):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in MIGRATIONS[number]:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number + 1}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
