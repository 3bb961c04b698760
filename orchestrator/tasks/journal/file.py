"""The journal's file: its locks, and an earlier process's tasks (OR-5).

Only one process at a time may use it, so that no task runs twice at once. The process holds two
locks until it exits, even while it is stopped: on a file next to the journal, which names the
owner, and on the journal itself. If the first file is removed, no second orchestrator can start,
and the file is recreated before the next transaction. If both files were replaced and another
process has them, this one never writes again. A damaged file is renamed, never deleted.
"""

import errno
import fcntl
import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from catalog.atomic import sync_folder
from orchestrator.clock import Boot, this_boot
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


class JournalError(Exception):
    """The journal cannot be opened; the message says why and what to do."""


class JournalHeld(JournalError):
    """Another process has the journal."""


class _LockedFile:
    """A file that this process locks. Methods may raise ``OSError``."""

    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        self._flags = flags
        self.file = -1
        self._inode = 0

    @property
    def is_locked(self) -> bool:
        """Whether the file that now has this name is the locked one."""
        return self.file >= 0 and inode_of(self._path) == self._inode

    def lock(self, journal: Path) -> None:
        """Lock the file that now has this name; create it if it is missing. Raises
        ``JournalHeld``."""
        file = os.open(self._path, self._flags | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 32, 0) if self._flags & os.O_RDWR else b""
            os.close(file)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise JournalHeld(
                f"{journal} belongs to another orchestrator that still lives (process "
                f"{holder.decode(errors='replace').strip() or '?'}); end it first, or set another "
                "TIDEGATE_JOURNAL__PATH: each needs one of its own"
            ) from None
        self.close()
        self.file, self._inode = file, os.fstat(file).st_ino

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            with suppress(OSError):
                os.close(file)


class JournalLock:
    """Holder of the journal's two locks. Used by one thread at a time; every method may raise
    ``OSError``."""

    def __init__(self, path: Path) -> None:
        """Take both locks. Raises ``JournalError`` if another process has them. Creates the
        journal's file if it is missing, so that it can be locked."""
        self._path = path
        self._beside = _LockedFile(Path(f"{path}.lock"), os.O_RDWR | os.O_NOFOLLOW)
        # Closing any descriptor of a file drops the locks that SQLite has on it in this process
        # (POSIX): so this one is closed when the file is another one already, or at the end.
        self._journal = _LockedFile(path, os.O_RDONLY)
        self._is_lost = False
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    def require(self) -> None:
        """Check before each transaction that both locks are still held. Raises ``JournalError`` if
        another process has taken them."""
        if self._beside.is_locked and self._journal.is_locked:
            return
        was_removed = not self._beside.is_locked
        try:
            if self._is_lost:
                raise JournalError
            self._take()
        except JournalError:
            self._is_lost = True
            raise JournalError(
                "another orchestrator has taken the journal, for its file and its lock were "
                "removed; nothing more is written here: end this one and start it again"
            ) from None
        if was_removed:
            service_log.warning(
                "the journal's lock file was removed and made again; leave it in place",
                extra=fields(journal=str(self._path)),
            )

    def close(self) -> None:
        self._journal.close()
        self._beside.close()

    def _take(self) -> None:
        if not self._beside.is_locked:
            self._beside.lock(self._path)
            with suppress(OSError):  # a full disk: the process id is only informational
                os.ftruncate(self._beside.file, 0)
                os.pwrite(self._beside.file, f"{os.getpid()}\n".encode(), 0)
        if not self._journal.is_locked:
            self._journal.lock(self._path)


def inode_of(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


VERSION: Final = 5
"""The version of 0.1.0. Files of earlier ones were never released."""

_SCHEMA: Final = (
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
            arrived_boot_s REAL
        )""",
    """CREATE UNIQUE INDEX tasks_by_idempotency_key ON tasks (key, idempotency_key)
            WHERE idempotency_key IS NOT NULL""",
    "CREATE INDEX tasks_that_live ON tasks (n) WHERE ended_unix IS NULL",
    # Finds old rows without a full scan.
    "CREATE INDEX tasks_by_end ON tasks (ended_unix) WHERE ended_unix IS NOT NULL",
    # Data that must not outlive a task's end has its own tables, so that it can be removed.
    "CREATE TABLE requests (n INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    """CREATE TABLE tokens (
            n INTEGER NOT NULL, first INTEGER NOT NULL, body BLOB NOT NULL,
            PRIMARY KEY (n, first)
        ) WITHOUT ROWID""",
    """CREATE TABLE results (
            n INTEGER PRIMARY KEY, ended_unix REAL NOT NULL, body BLOB
        )""",
    "CREATE INDEX results_by_end ON results (ended_unix)",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)


def _create(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


LOCK_WAIT_S = 1.0
"""Seconds to wait for another connection to release the file: a backup, an operator's shell."""
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    # Zeroes deleted data: a prompt leaves the file with its row. Its copy in the write-ahead log is
    # overwritten by later writes, and truncated at a checkpoint.
    "PRAGMA secure_delete = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA journal_size_limit = 16777216",
    "PRAGMA cache_size = -1024",  # KiB of each connection; the kernel keeps the file's pages too
)
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


@dataclass(frozen=True, slots=True)
class JournalConfig:
    path: Path
    terms: JournalTerms = field(default_factory=JournalTerms)


@dataclass(frozen=True, slots=True)
class JournalFile:
    """An open journal, exclusive to this process until ``close``."""

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
        # Resolve links: another name would have another lock.
        config = replace(config, path=config.path.resolve())
        config.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = JournalLock(config.path)
    except OSError as error:
        raise JournalError(f"{config.path}: {error.strerror}") from None
    try:
        return _open(config, lock)
    except BaseException as error:
        lock.close()
        if isinstance(error, sqlite3.Error | OSError):
            raise JournalError(f"{config.path}: {error}") from None
        raise


def connect(config: JournalConfig, *, is_new: bool = False) -> sqlite3.Connection:
    """A connection for one thread. Raises ``sqlite3.Error`` or ``OSError``, also if the file is
    missing unless it ``is_new``.

    While it is open this process must not close another descriptor of the file: that would drop all
    of its locks (POSIX), and another reader would then delete the log on leaving.
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
    """Create the file if it is missing, and remove other users' access to it, for example after a
    restore. SQLite gives its other files the same permissions."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError, PermissionError):
            if os.stat(f"{path}{suffix}").st_mode & 0o077:
                os.chmod(f"{path}{suffix}", 0o600)


def set_aside(path: Path) -> Path:
    """Rename a damaged file and the files that belong to it; returns its new path."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    for suffix in ("-wal", "-shm", ""):  # SQLite deletes a log without its file
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    sync_folder(path.parent)
    service_log.error(
        "the journal is damaged: it was set aside and a new one begun; durable tasks that only it "
        "knew are lost unless it is repaired (sqlite3 FILE .recover)",
        extra=fields(journal=str(path), set_aside=str(aside)),
    )
    return aside


def is_damage(error: Exception) -> bool:
    """Whether the file itself is damaged, and not its disk."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return name.startswith(_DAMAGED)


def describe_error(error: Exception, path: Path) -> str:
    """A description for clients of an error of the journal at ``path``: without local paths, and
    only the kind of an unexpected error."""
    if isinstance(error, OSError):
        return error.strerror or "the disk failed"
    if isinstance(error, sqlite3.Error | JournalError):
        return str(error).replace(str(path), "the journal's file")
    return "an internal error; the log says which"


def prepare(config: JournalConfig) -> None:
    """Create all tables of a file. Raises ``JournalError`` and the errors of ``connect``."""
    with closing(connect(config, is_new=True)) as db:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, VERSION):  # 0: a new one
            raise JournalError(
                f"{config.path} is of version {version}, and this Tidegate knows {VERSION}: run "
                "the Tidegate that wrote it, or set another TIDEGATE_JOURNAL__PATH"
            )
        if not version:
            _create(db)


def _open(config: JournalConfig, lock: JournalLock) -> JournalFile:
    aside = None
    try:
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


def _read(config: JournalConfig) -> tuple[int, list[UnfinishedTask]]:
    """Check the whole file. Returns the next number and the unfinished tasks."""
    with closing(connect(config)) as db:
        (checked,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if checked != "ok":
            error = sqlite3.DatabaseError(f"the file is damaged: {checked}")
            error.sqlite_errorname = "SQLITE_CORRUPT"
            raise error
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
