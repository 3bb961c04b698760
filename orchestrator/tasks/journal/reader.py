"""Looks tasks up in the journal's file."""

import os
import sqlite3

from orchestrator.tasks.journal.file import JournalFile, connect, describe_error
from orchestrator.tasks.journal.look_ups import ById, Found, LookUps, Question
from orchestrator.tasks.journal.packed import read_record
from orchestrator.tasks.journal.records import COLUMNS, StoredResult, TaskRow

_LOOK = (
    f"SELECT {', '.join(f't.{name}' for name in COLUMNS)}, r.body FROM tasks t "
    "LEFT JOIN results r ON r.n = t.n"
)


class JournalReader(LookUps):
    """Reads the file that has the journal's name."""

    failures = (sqlite3.Error, OSError)

    def __init__(self, file: JournalFile) -> None:
        super().__init__()
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._inode = 0

    def _look(self, question: Question) -> Found | None:
        if isinstance(question, ById):
            where, values = "t.id = ?", [question.task_id]
        else:
            where = "t.key = ? AND t.idempotency_key = ?"
            values = [question.key, question.idempotency_key]
        try:
            found = self._connection().execute(f"{_LOOK} WHERE {where}", values).fetchone()
        except sqlite3.Error:
            self._disconnect()
            raise
        if found is None:
            return None
        *columns, body = found
        row = TaskRow(*columns)
        return Found(row, read_record(StoredResult, row.n, body))

    def _told(self, error: Exception) -> str:
        return describe_error(error, self._file.config.path)

    def _connection(self) -> sqlite3.Connection:
        inode = os.stat(self._file.config.path).st_ino
        if self._db is None or inode != self._inode:
            self._disconnect()
            self._db, self._inode = connect(self._file.config), inode
        return self._db

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()
