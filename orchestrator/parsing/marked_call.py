"""Base for calls that are written with marks around a name, read a step at a time."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from orchestrator.parsing.json_call import MAX_SHORT, WHITESPACE, Arguments, Wrong

_NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)


class MarkedCall(ABC):
    """One call. ``name`` is empty until it is known."""

    def __init__(self) -> None:
        self.name = ""
        self.is_over = False
        self._untold = ""
        self._mark = ""
        """The part of a mark that has been read."""
        self._word = ""
        """The part of a name that has been read."""
        self._arguments = Arguments()
        self._read: Callable[[str, int], int] = self._begin
        """Reads a text from a place in it on, and returns how far it has come."""

    def feed(self, text: str) -> int:
        """Read ``text``; returns how much of it belongs to the call. Raises ``Wrong``."""
        at = 0
        while at < len(text) and not self.is_over:
            at = self._read(text, at)
        return at

    def take(self) -> str:
        """The new part of the arguments, as JSON."""
        untold, self._untold = self._untold, ""
        return untold

    @abstractmethod
    def _begin(self, text: str, at: int) -> int:
        """Read the beginning of a call."""

    # steps that formats are made of

    def _object(self, text: str, at: int) -> int:
        """Read the arguments as one JSON object, with white space before it; the call ends with
        it."""
        if not self._arguments.has_begun:
            at = self._behind_space(text, at)
            if at == len(text):
                return at
            if text[at] != "{":
                raise Wrong(at + 1)
        new, at = self._arguments.feed(text, at)
        self._untold += new
        self.is_over = self._arguments.is_over
        return at

    def _behind_space(self, text: str, at: int) -> int:
        while at < len(text) and text[at] in WHITESPACE:
            at += 1
        return at

    def _tag(self, text: str, at: int, tags: tuple[str, ...]) -> tuple[int, str]:
        """Read one of ``tags`` behind white space; returns the place behind it and the tag, which
        is empty while that is open."""
        if not self._mark:
            at = self._behind_space(text, at)
        while at < len(text):
            self._mark += text[at]
            at += 1
            if not any(tag.startswith(self._mark) for tag in tags):
                raise Wrong(at)
            if self._mark in tags:
                mark, self._mark = self._mark, ""
                return at, mark
        return at, ""

    def _word_up_to(self, text: str, at: int, ends: str) -> tuple[int, str | None]:
        """Read a name up to one of the characters ``ends``, which is left; returns the place and
        the name, None while that is open."""
        found = [end for char in ends if (end := text.find(char, at)) >= 0]
        stop = min(found, default=len(text))
        self._word += text[at:stop]
        over = len(self._word) - MAX_SHORT
        if over > 0:
            raise Wrong(stop - over + 1)
        if not found:
            return stop, None
        word, self._word = self._word, ""
        return stop, word.strip(WHITESPACE)

    def _checked(self, name: str, at: int) -> str:
        """A tool's ``name``, which ends at ``at``. Raises ``Wrong`` if it cannot be one."""
        if not _NAME.fullmatch(name):
            raise Wrong(at + 1)
        return name
