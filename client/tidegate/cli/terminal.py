"""Output of the commands: tables for people, JSON for programs.

Color and width follow the terminal, ``NO_COLOR`` and ``COLUMNS``. Output to a file or pipe has no
color, and its lines are not cut.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 400
"""Width in columns of output to a file or pipe, so that nothing is cut."""

CONTROL_CHARACTERS = dict.fromkeys(set(range(32)) - {9, 10} | set(range(127, 160)))
"""Control characters to delete: otherwise a model could send escape sequences to the terminal."""


def console(*, to_stderr: bool = False) -> "Console":
    from rich.console import Console

    file = sys.stderr if to_stderr else sys.stdout
    width = None if file.isatty() or "COLUMNS" in os.environ else _WIDE
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Print ``value`` as one indented JSON document."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def show_list(
    found: object,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str],
    as_json: bool,
) -> int:
    """Print a result as JSON or as a table of ``rows``, with columns named in ``numbers`` aligned
    to the right; returns the exit status."""
    if as_json:
        print_json(found)
        return 0
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        is_number = column in numbers
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(column, justify=justify, no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
    return 0


def print_facts(facts: Mapping[str, str]) -> None:
    """Print the known facts, one per line."""
    out = console()
    for name, value in facts.items():
        if value:
            out.print(f"{name:<12}{value}", soft_wrap=True)


def duration(ms: float | None) -> str:
    """A duration as text, such as ``7.0 ms``, ``1.2 s`` or ``3 min``; a dash for None."""
    if ms is None:
        return "–"
    if abs(ms) < 1000:
        return f"{ms:.1f} ms" if abs(ms) < 10 else f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if abs(ms) < 100_000 else f"{ms / 60_000:.0f} min"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}".replace(",", " ")


def size(bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(bytes)
