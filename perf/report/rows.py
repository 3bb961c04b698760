"""Rows of the GPU run: written one by one, so that a section that dies keeps what it has found."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. ``value`` is a number in ``unit``, or a word."""

    section: str
    what: str
    value: float | str
    unit: str = ""
    note: str = ""


class Report:
    """Appends to a file of JSON lines and says each row aloud."""

    def __init__(self, section: str, file: Path, *, ends_at: float) -> None:
        """``ends_at``: ``time.monotonic()`` by which the section is to be done."""
        self._section = section
        self._file = file
        self._ends_at = ends_at

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()

    def add(self, what: str, value: float | str, unit: str = "", note: str = "") -> None:
        row = Row(self._section, what, value, unit, note)
        with self._file.open("a") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        print(line(row), flush=True)

    def attempt(self, what: str, call: Callable[[], None]) -> None:
        """Do ``call``; when it fails, that is a row, and the section goes on."""
        if self.left_s <= 0:
            self.add(what, "left out", note="no time left")
            return
        try:
            call()
        except Exception as error:  # whatever a compiler, driver or library raises
            text = (str(error).strip().splitlines() or [""])[0]
            self.add(what, "FAILED", note=f"{type(error).__name__}: {text}"[:300])


def read_rows(file: Path) -> list[Row]:
    if not file.exists():
        return []
    return [Row(**json.loads(text)) for text in file.read_text().splitlines()]


def line(row: Row) -> str:
    value = row.value if isinstance(row.value, str) else f"{row.value:,.4g}"
    note = f"   {row.note}" if row.note else ""
    return f"{row.section:<10} {row.what:<58} {value:>12} {row.unit:<9}{note}".rstrip()
