"""Locks a journal for one process at a time, even if somebody removes the lock's file.

Two locks are held for as long as the process lives, stopped or not: on a file beside the journal,
which says whose it is, and on the journal itself. Removing the first one does not open the way for
a second orchestrator, and it is made anew before the next transaction. Where both files were
replaced, and another process has them, this one never writes again.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from orchestrator.telemetry.log import fields, service_log

_TRIES = 10


class JournalError(Exception):
    """The journal cannot be opened; the message says why, and what to do."""


class JournalHeld(JournalError):
    """Another process has the journal."""


class JournalLock:
    """Holder of the journal's two locks. Used by one thread at a time; every method may raise
    ``OSError``."""

    def __init__(self, path: Path) -> None:
        """Take both locks. Raises ``JournalError`` where another process has them. Creates the
        journal's file if missing, so that it can be locked."""
        self._path = path
        self._beside = Path(f"{path}.lock")
        self._lock = self._file = -1
        self._lock_inode = self._file_inode = 0
        self._is_lost = False
        try:
            self._take_lock()
            self._take_file()
        except BaseException:
            self.close()
            raise

    def require(self) -> None:
        """Check that both locks are still held, before each transaction. Raises ``JournalError``
        where another process has taken them."""
        if _inode(self._beside) == self._lock_inode and _inode(self._path) == self._file_inode:
            return
        try:
            if self._is_lost:
                raise JournalError
            if _inode(self._beside) != self._lock_inode:
                self._take_lock()
                service_log.warning(
                    "the journal's lock file was removed: it was made anew; leave it where it is",
                    extra=fields(journal=str(self._path)),
                )
            self._take_file()
        except JournalError:
            self._is_lost = True
            raise JournalError(
                "another orchestrator has taken the journal, for its file and its lock were "
                "removed; nothing more is written here: end this one and start it again"
            ) from None

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file >= 0:
                with suppress(OSError):
                    os.close(file)
        self._lock = self._file = -1

    def _take_lock(self) -> None:
        for _ in range(_TRIES):
            lock = os.open(self._beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                _lock(lock, self._path, os.pread(lock, 32, 0).decode(errors="replace").strip())
                inode = os.fstat(lock).st_ino
                if _inode(self._beside) != inode:  # removed meanwhile
                    os.close(lock)
                    continue
            except BaseException:
                os.close(lock)
                raise
            with suppress(OSError):  # a full disk: the process id is for people only
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            old, self._lock, self._lock_inode = self._lock, lock, inode
            if old >= 0:
                os.close(old)
            return
        raise JournalError(
            f"{self._beside} is removed again and again; stop the process that removes it"
        )

    def _take_file(self) -> None:
        """Lock the file that has the journal's name now.

        Closing any descriptor of a file drops the locks that SQLite has on it in this process
        (POSIX): so this one is closed when the file is another one already, or at the end.
        """
        if self._file >= 0 and _inode(self._path) == self._file_inode:
            return
        file = os.open(self._path, os.O_RDONLY | os.O_CREAT, 0o600)
        try:
            _lock(file, self._path, "")
        except BaseException:
            os.close(file)
            raise
        old, self._file, self._file_inode = self._file, file, os.fstat(file).st_ino
        if old >= 0:
            os.close(old)


def _lock(file: int, path: Path, holder: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise JournalHeld(
            f"{path} belongs to another orchestrator that still lives (process {holder or '?'}); "
            "end it first, or set another TIDEGATE_JOURNAL__PATH: each needs one of its own"
        ) from None


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
