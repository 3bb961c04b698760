"""``python -m tools.clients_page RESULTS.json``: writes what ``make test-clients`` has shown into
the table of docs/clients.md.

A client that was not run keeps its row; a new client is added at the end.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec

from catalog.paths import ROOT

PAGE: Final = ROOT / "docs" / "clients.md"
_HEAD: Final = "| client | version | what is shown | result | on |"


class ClientRow(msgspec.Struct, forbid_unknown_fields=True):
    """A run's result for a client; ``date`` is ISO 8601."""

    client: str
    version: str
    shows: str
    result: str
    date: str

    def line(self) -> str:
        """The row as Markdown."""
        return f"| {' | '.join(msgspec.structs.astuple(self))} |"


def with_rows(page: str, rows: list[ClientRow]) -> str:
    """``page`` with ``rows`` in its table. Raises ``ValueError`` for a page without that table."""
    lines = page.splitlines()
    if _HEAD not in lines:
        raise ValueError(f"the page has no table that begins with {_HEAD}")
    begin = lines.index(_HEAD) + 2
    end = begin
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    known = {line.split("|")[1].strip(): line for line in lines[begin:end]}
    known |= {row.client: row.line() for row in rows}
    return "\n".join([*lines[:begin], *known.values(), *lines[end:]]) + "\n"


def main(results: Path) -> None:
    rows = msgspec.json.decode(results.read_bytes(), type=list[ClientRow])
    PAGE.write_text(with_rows(PAGE.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
