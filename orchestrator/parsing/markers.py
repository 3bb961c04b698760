"""Finds markers in a text that arrives in pieces."""

from collections.abc import Iterable

from orchestrator.parsing.json_call import WHITESPACE

MAX_SPACE = 64
"""Most characters of white space around a marker that count as part of it. More is text. So endless
empty lines of a model are neither held back nor searched repeatedly."""


def begun(text: str, marker: str) -> int:
    """Number of characters at the end of ``text`` that may be the start of ``marker``."""
    at = max(0, len(text) - len(marker) + 1)
    while (at := text.find(marker[0], at)) >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


def certain(text: str, *markers: str) -> int:
    """Index before which ``text`` certainly has no part of ``markers`` or white space of one."""
    most = 0
    for marker in markers:
        most = max(most, begun(text, marker))
    return without_space(text, len(text) - most)


def first_of(text: str, markers: Iterable[str]) -> tuple[int, int]:
    """Start and end of the first of ``markers`` in ``text``; (-1, -1) if there is none."""
    first, end = -1, -1
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (first < 0 or at < first):
            first, end = at, at + len(marker)
    return first, end


def without_space(text: str, end: int) -> int:
    """Start of the white space before ``end`` that counts."""
    return max(len(text[:end].rstrip(WHITESPACE)), end - MAX_SPACE)


def has_too_much_space(text: str, rest: str) -> bool:
    """Whether ``text`` has more white space before ``rest`` than counts."""
    return len(text) - len(rest) > MAX_SPACE
