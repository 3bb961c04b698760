"""The journal's file: who may open it, and what an earlier process left in it (OR-5).

One process at a time may use it (``lock``), so that no task ever runs twice at once. A damaged file
is renamed, never deleted.
"""

import errno
import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from catalog.atomic import sync_folder
from orchestrator.clock import Boot, this_boot
from orchestrator.tasks.journal.lock import JournalError, JournalLock
from orchestrator.tasks.journal.records import (
    COLUMNS,
    StoredRequest,
    TaskRow,
    UnfinishedTask,
    read_record,
    read_tokens,
)
from orchestrator.tasks.journal.store import JournalTerms
from orchestrator.telemetry.log import fields, service_log

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
    """Bring a file up to ``VERSION``, each step in a transaction of its own."""
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


LOCK_WAIT_S = 1.0
"""Seconds for another connection to let go of the file: a backup, an operator's shell."""
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    # Zeroes deleted data: a prompt is gone from the file with its row. What the write-ahead log
    # still has of it is overwritten by later writes, and cut off at a checkpoint.
    "PRAGMA secure_delete = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA journal_size_limit = 16777216",
    "PRAGMA cache_size = -1024",  # KiB of each connection; the kernel keeps the file's pages too
)
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """Settings of the journal's file."""

    path: Path
    terms: JournalTerms = field(default_factory=JournalTerms)


@dataclass(frozen=True, slots=True)
class JournalFile:
    """An opened journal: this process's alone until ``close``."""

    config: JournalConfig
    lock: JournalLock
    next_n: int
    unfinished: list[UnfinishedTask]
    set_aside: Path | None
    boot: Boot

    def close(self) -> None:
        self.lock.close()


def open_journal(config: JournalConfig) -> JournalFile:
    """Lock or create the file, and read its unfinished tasks. Raises ``JournalError``."""
    try:
        # Under another name, a link's, it would have another lock.
        config = replace(config, path=config.path.resolve())
        config.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = JournalLock(config.path)
    except OSError as error:
        raise JournalError(f"{config.path}: {error.strerror}") from None
    try:
        return _open(config, lock)
    except (sqlite3.Error, OSError) as error:
        lock.close()
        raise JournalError(f"{config.path}: {error}") from None
    except BaseException:
        lock.close()
        raise


def connect(config: JournalConfig, *, is_new: bool = False) -> sqlite3.Connection:
    """A connection for one thread. Raises ``sqlite3.Error`` or ``OSError``, also for a missing file
    unless it ``is_new``.

    While it is open nobody here may close another descriptor of the file: that would drop all locks
    that this process has on it (POSIX), and whoever else reads the file and leaves it would then
    take itself for the last one and delete the log that is being written.
    """
    if is_new:
        _make_private(config.path)
    if not os.access(config.path, os.R_OK | os.W_OK):
        os.stat(config.path)  # raises if there is no file
        raise PermissionError(errno.EACCES, "it cannot be written", str(config.path))
    uri = f"{config.path.absolute().as_uri()}?mode=rw"
    db = sqlite3.connect(uri, uri=True, timeout=LOCK_WAIT_S, isolation_level=None)
    try:
        for pragma in _PRAGMAS:
            db.execute(pragma)
    except BaseException:
        db.close()
        raise
    return db


def _make_private(path: Path) -> None:
    """Create the file if missing, and take it away from other users if they may read it, for
    instance after a restore. SQLite gives the files beside it the same permissions."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError, PermissionError):
            if os.stat(f"{path}{suffix}").st_mode & 0o077:
                os.chmod(f"{path}{suffix}", 0o600)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, with the files that belong to it; returns its new path."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    sync_folder(path.parent)
    service_log.error(
        "the journal is damaged: it was set aside and a new one begun; durable tasks that only it "
        "knew are lost unless it is repaired (sqlite3 FILE .recover)",
        extra=fields(journal=str(path), set_aside=str(aside)),
    )
    return aside


def finish_set_aside(path: Path) -> None:
    """Finish a rename that a crash cut short, leaving a log without its file, which SQLite would
    delete with the next file's first page. The log goes to where its file is."""
    with suppress(FileNotFoundError):
        if not os.stat(f"{path}-wal").st_size or (path.exists() and path.stat().st_size):
            return
        names = [p.name for p in path.parent.glob(f"{path.name}.damaged-*")]
        asides = [path.with_name(name) for name in sorted(names) if name.endswith("Z")]
        if not asides or Path(f"{asides[-1]}-wal").exists():
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
            asides = [path.with_name(f"{path.name}.damaged-{stamp}")]
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{asides[-1]}{suffix}")
        sync_folder(path.parent)
        service_log.warning(
            "a damaged journal had been set aside without its log: that is beside it now",
            extra=fields(journal=str(path), set_aside=str(asides[-1])),
        )


def is_damage(error: Exception) -> bool:
    """Whether the file itself is wrong, rather than the disk that it is on."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return name.startswith(_DAMAGED)


def describe_error(error: Exception, path: Path) -> str:
    """A description of an error of the journal at ``path``, for clients: without paths of the
    machine, and with no more than the kind of an unforeseen error."""
    if isinstance(error, OSError):
        return error.strerror or "the disk failed"
    if isinstance(error, sqlite3.Error | JournalError):
        return str(error).replace(str(path), "the journal's file")
    return "an internal error; the log says which"


def prepare(config: JournalConfig) -> None:
    """Give a file all its tables. Raises ``JournalError``, and what ``connect`` does."""
    finish_set_aside(config.path)
    with closing(connect(config, is_new=True)) as db:
        version = version_of(db)
        if version > VERSION:
            raise JournalError(
                f"{config.path} is of version {version}, and this Tidegate knows {VERSION}: run "
                "the newer one, or set another TIDEGATE_JOURNAL__PATH"
            )
        if 0 < version < FIRST:
            raise JournalError(
                f"{config.path} is of a Tidegate before 0.1.0, and may be encrypted: end its tasks "
                "with that one, then remove it, or set another TIDEGATE_JOURNAL__PATH; nothing was "
                "changed"
            )
        migrate(db)


def _open(config: JournalConfig, lock: JournalLock) -> JournalFile:
    aside = None
    try:
        finish_set_aside(config.path)
        _require_whole(config)
        prepare(config)
        next_n, unfinished = _read(config)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        aside = set_aside(config.path)
        lock.require()
        prepare(config)
        next_n, unfinished = 1, []
    return JournalFile(config, lock, next_n, unfinished, aside, this_boot())


def _require_whole(config: JournalConfig) -> None:
    if not config.path.exists():
        return
    with closing(connect(config)) as db:
        found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            error = sqlite3.DatabaseError(f"the file is damaged: {found}")
            error.sqlite_errorname = "SQLITE_CORRUPT"
            raise error


def _read(config: JournalConfig) -> tuple[int, list[UnfinishedTask]]:
    with closing(connect(config)) as db:
        found = db.execute(
            f"SELECT {', '.join(f't.{name}' for name in COLUMNS)}, r.body FROM tasks t "
            "LEFT JOIN requests r ON r.n = t.n WHERE t.ended_unix IS NULL ORDER BY t.n"
        ).fetchall()
        unfinished = []
        for *columns, body in found:
            row = TaskRow(*columns)
            blobs = db.execute(
                "SELECT first, body FROM tokens WHERE n = ? ORDER BY first", (row.n,)
            )
            request = read_record(StoredRequest, row.n, body)
            unfinished.append(UnfinishedTask(row, request, read_tokens(row.n, blobs)))
        (last,) = db.execute("SELECT coalesce(max(n), 0) FROM tasks").fetchone()
        return int(last) + 1, unfinished
