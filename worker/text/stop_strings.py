"""Finds stop strings across any split of a text, and lets nothing of them through."""

from collections.abc import Sequence
from typing import NamedTuple


class Passed(NamedTuple):
    """Text that may be shown. ``stopped``: a stop string followed it, and the text is over."""

    text: str
    stopped: bool


class StopMatcher:
    """Cuts a text before the first stop string that completes; of several, before the longest.

    Holds back only what may still become a stop string. Each stop string is tracked by the length
    of its longest prefix that ends the text (Knuth, Morris, Pratt), so a character costs the same
    wherever the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallback(stop) for stop in stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""
        self.found = ""
        """The stop string that ended the text; empty while none has."""

    def feed(self, text: str) -> Passed:
        """Pass on text that cannot be part of a stop string, after what was held back before."""
        if not self._held and self._first_chars.isdisjoint(text):
            return Passed(text, False)
        seen = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            found = self._advance(char)
            if found:
                self.found = found
                self._held = ""
                return Passed(seen[: position - len(found)], True)
        keep = max(self._matched)
        self._held = seen[len(seen) - keep :]
        return Passed(seen[: len(seen) - keep], False)

    def flush(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str:
        """Take one character; returns the longest stop string that it completes, or ""."""
        longest = ""
        for i, stop in enumerate(self._stops):
            matched, fallback = self._matched[i], self._fallbacks[i]
            while matched and stop[matched] != char:
                matched = fallback[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                longest = max(longest, stop, key=len)
                matched = 0
            self._matched[i] = matched
        return longest


def _fallback(pattern: str) -> tuple[int, ...]:
    """The length, for each prefix of ``pattern``, of its longest proper prefix that is a suffix."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i] = matched
    return tuple(table)
