"""Seals rows in plain text, or of an earlier key, with the current first key.

::

    meta key_probe:NAME   something sealed with each key that rows may need; without that key the
                          journal is not opened, so that no row is given up for lack of it
    meta resealed         all rows are sealed by this key: the other probes are gone

The rows are walked over once, a bounded number at a time, in between other writes.
"""

import sqlite3
from dataclasses import dataclass

from orchestrator.tasks.journal.sealing import PREFIX_BYTES, Sealer, WrongKey
from orchestrator.telemetry.log import fields, service_log

RESEAL_ROWS = 500
"""Rows examined in one transaction, lest submissions wait for it."""


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    kind: str
    """The kind that the rows are sealed as."""
    keys: str

    def place(self, key: tuple[int, ...]) -> str:
        return " ".join([self.kind, *map(str, key)])


_TABLES = (
    _Table("requests", "request", "n"),
    _Table("tokens", "tokens", "n, first"),
    _Table("results", "result", "n"),
)


def check_keys(db: sqlite3.Connection, sealer: Sealer) -> None:
    """Check that all keys are there that rows may need, and store a probe of ours. Raises
    ``WrongKey``."""
    probes = db.execute("SELECT name, value FROM meta WHERE name GLOB 'key_probe*'").fetchall()
    for _, probe in probes:
        sealer.check(probe)
    mine = f"key_probe:{sealer.name}"
    if sealer.has_key and mine not in [name for name, _ in probes]:
        db.execute("INSERT INTO meta VALUES (?, ?)", (mine, sealer.probe()))


def count_foreign(db: sqlite3.Connection, sealer: Sealer) -> int:
    """Number of rows to be sealed again; logged once. Reads all rows, but only the first time with
    a new key."""
    if not sealer.has_key or _is_done(db, sealer):
        return 0
    plain = found = 0
    for table in _TABLES:
        rows, in_plain = db.execute(
            f"SELECT count(*), coalesce(sum(substr(body, 1, 1) = x'00'), 0) FROM {table.name} "
            f"WHERE substr(body, 1, {PREFIX_BYTES}) IS NOT ?",
            (sealer.prefix,),
        ).fetchone()
        found += rows
        plain += in_plain
    if found:
        service_log.warning(
            "the journal has rows in plain text or of an earlier key: they are sealed with the "
            "first key meanwhile; keep the others until that is said to be done",
            extra=fields(rows=found, in_plain_text=plain),
        )
    else:
        _done(db, sealer)
    return found


class Resealing:
    """One walk over all rows. Runs on the writer's thread."""

    def __init__(self, sealer: Sealer, is_needed: bool) -> None:
        self._sealer = sealer
        self._tables = list(_TABLES) if is_needed else []
        self._after: tuple[int, ...] = ()
        self._sealed = self._unreadable = 0

    @property
    def is_over(self) -> bool:
        return not self._tables

    def step(self, db: sqlite3.Connection) -> None:
        """Seal the next rows. Raises ``sqlite3.Error``; then the same rows come again."""
        table = self._tables[0]
        after = self._after or tuple(-1 for _ in table.keys.split(","))
        marks = ", ".join("?" * len(after))
        db.execute("BEGIN IMMEDIATE")
        rows = db.execute(
            f"SELECT {table.keys}, iif(substr(body, 1, {PREFIX_BYTES}) = ?, NULL, body) "
            f"FROM {table.name} WHERE ({table.keys}) > ({marks}) ORDER BY {table.keys} LIMIT ?",
            (self._sealer.prefix, *after, RESEAL_ROWS),
        ).fetchall()
        sealed, unreadable = [], 0
        for *numbers, body in rows:
            key = tuple(numbers)
            if body is None:
                continue
            try:
                blob = self._sealer.open(body, table.place(key))
            except WrongKey:  # damaged: every key is there
                unreadable += 1
            else:
                sealed.append((self._sealer.seal(blob, table.place(key)), *key))
        db.executemany(f"UPDATE {table.name} SET body = ? WHERE ({table.keys}) = ({marks})", sealed)
        is_last = len(rows) < RESEAL_ROWS
        if is_last and len(self._tables) == 1:
            _done(db, self._sealer)
        db.execute("COMMIT")
        self._sealed += len(sealed)
        self._unreadable += unreadable
        self._after = () if is_last else tuple(rows[-1][:-1])
        if is_last:
            del self._tables[0]
            if self.is_over:
                # The write-ahead log still has the old contents.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                service_log.info(
                    "all of the journal is sealed with the first key: the others may go",
                    extra=fields(rows=self._sealed, unreadable=self._unreadable or None),
                )


def _is_done(db: sqlite3.Connection, sealer: Sealer) -> bool:
    found = db.execute("SELECT value FROM meta WHERE name = 'resealed'").fetchone()
    return found is not None and bytes(found[0]) == sealer.prefix


def _done(db: sqlite3.Connection, sealer: Sealer) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('resealed', ?)", (sealer.prefix,))
    db.execute(
        "DELETE FROM meta WHERE name GLOB 'key_probe*' AND name != ?", (f"key_probe:{sealer.name}",)
    )
