"""Finds markers in a text that comes a piece at a time."""

from collections.abc import Iterable

from orchestrator.parsing.json_call import WHITESPACE

MAX_SPACE = 64
"""Most white space around a marker that counts as part of it, in characters; any more is text. A
model that writes empty lines for ever is therefore neither held back nor searched repeatedly."""


def begun(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    at = max(0, len(text) - len(marker) + 1)
    while (at := text.find(marker[0], at)) >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


def certain(text: str, *markers: str) -> int:
    """Index up to which ``text`` is certainly no part of ``markers`` or space before one."""
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
    """Start of the white space before ``end``, as far as it counts."""
    return max(len(text[:end].rstrip(WHITESPACE)), end - MAX_SPACE)


def has_too_much_space(text: str, rest: str) -> bool:
    """Whether more space than counts was taken off the beginning of ``text`` to leave ``rest``."""
    return len(text) - len(rest) > MAX_SPACE
