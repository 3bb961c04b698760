"""Separates the thinking in tags at the start of a model's output."""

from collections.abc import Callable
from typing import NamedTuple

from orchestrator.parsing.json_call import WHITESPACE
from orchestrator.parsing.markers import certain, has_too_much_space, without_space
from orchestrator.parsing.pieces import Piece, Reasoning


class Tags(NamedTuple):
    open: str
    close: str


class ReasoningReader:
    """Separates the thinking at the start of an output, without the white space around its tags."""

    __slots__ = ("_held", "_inside", "_read", "_tags", "is_over")

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        """``is_open``: the prompt ends within the thinking."""
        self._tags = tags
        self._held = ""
        self._inside = False
        self._read: Callable[[str, list[Piece]], str] = self._begin
        self.is_over = False
        """Whether all following text is the answer."""
        if is_open:
            self._read = self._think

    @property
    def has_begun(self) -> bool:
        """Whether the output is currently within the thinking."""
        return self._read == self._think

    def feed(self, text: str, out: list[Piece]) -> str:
        """Read text and add pieces to ``out``. Returns the text after the end if ``is_over``."""
        text, self._held = self._held + text, ""
        while text and not self.is_over:
            text = self._read(text, out)
        return text

    def finish(self, out: list[Piece]) -> str:
        """End the output. Adds held text to ``out``, or returns it if it is not thinking."""
        held, self._held = self._held, ""
        if self._read == self._think:
            self._tell(held.rstrip(WHITESPACE), out)
            return ""
        return held

    def _begin(self, text: str, out: list[Piece]) -> str:
        start = text.lstrip(WHITESPACE)
        if has_too_much_space(text, start):
            self.is_over = True
            return text
        if start.startswith(self._tags.open):
            self._read = self._think
            return start[len(self._tags.open) :]
        if self._tags.open.startswith(start):
            self._held = text
            return ""
        self.is_over = True
        return text

    def _think(self, text: str, out: list[Piece]) -> str:
        close = text.find(self._tags.close)
        if close < 0:
            end = certain(text, self._tags.close)
            self._held = text[end:]
            self._tell(text[:end], out)
            return ""
        self._tell(text[: without_space(text, close)], out)
        self._read = self._answer
        return text[close + len(self._tags.close) :]

    def _tell(self, text: str, out: list[Piece]) -> None:
        if not self._inside:
            text = text.lstrip(WHITESPACE)
        if text:
            self._inside = True
            out.append(Reasoning(text))

    def _answer(self, text: str, out: list[Piece]) -> str:
        """Skip white space before the answer."""
        text = text.lstrip(WHITESPACE)
        self.is_over = bool(text)
        return text
