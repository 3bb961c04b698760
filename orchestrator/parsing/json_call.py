"""A call as models write it, read as it grows: ``{"name": …, "arguments": {…}}``, or a name and
then its arguments, with marks around it (``MarkedCall``) or without.

On the way, only the ends of things are looked for; whether the arguments are JSON is known at their
end.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from enum import Enum, auto

import msgspec

WHITESPACE = " \t\r\n"
_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\s]")
_HEAD = re.compile(
    r"\s*+([A-Za-z0-9_.:-]++)\s*+(?:\[CALL_ID\]\w*+\s*+)?(?:\[ARGS\]\s*+)?", re.ASCII
)
"""Possessive quantifiers: otherwise spaces would be tried in every way."""
MAX_SHORT = 256
"""Most characters of a key, a name or another short value; with more it is not a call."""
_decode = msgspec.json.Decoder().decode


class Value:
    """Finds the end of one JSON value that begins with a bracket or a quote."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str, at: int = 0) -> int:
        """Index in ``text`` behind the value, which continues at ``at``; -1: not yet."""
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while True:
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return -1
            at = match.end()
            mark = match.group()
            if mark == "\\":
                if at == len(text):
                    self._escaped = True
                    return -1
                at += 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif mark in "{[":
                self._depth += 1
            else:
                self._depth -= 1
            if self._depth <= 0 and not self._in_string:
                return at


class Wrong(ValueError):
    """The text is not a call. ``at`` is behind the first character that shows it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at


class Arguments:
    """A call's arguments: a JSON object, or such an object in a JSON string."""

    __slots__ = ("_held", "_is_string", "_parts", "_value", "is_over")

    def __init__(self) -> None:
        self._value = Value()
        self._parts: list[str] = []
        self._is_string: bool | None = None
        self._held: list[str] = []
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        return self._is_string is not None

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """Read on at ``at``; returns the new JSON and where it ended. Raises ``Wrong``."""
        if self._is_string is None:
            self._is_string = text[at] == '"'
        end = self._value.end_in(text, at)
        self.is_over = end >= 0
        end = end if self.is_over else len(text)
        self._parts.append(text[at:end])
        if not self.is_over:
            return ("" if self._is_string else text[at:end]), end
        whole = "".join(self._parts)
        try:
            value = _decode(whole)
            if self._is_string:
                whole, value = value, _decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise Wrong(end) from None
        if not isinstance(value, dict):
            raise Wrong(end)
        return (whole if self._is_string else text[at:end]), end


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_NAME = auto()
    IN_ARGUMENTS = auto()
    IN_OTHER = auto()
    IN_SCALAR = auto()
    BEHIND_VALUE = auto()
    OVER = auto()


class JsonCall:
    """Reads a call as one JSON object. ``name`` is empty until it is known."""

    __slots__ = ("_arguments", "_at", "_key", "_names", "_short", "_untold", "_value", "name")

    def __init__(self, names: Container[str] | None = None) -> None:
        """A call of a tool that is not in ``names`` is not a call; None allows any name."""
        self.name = ""
        self._names = names
        self._at = _At.START
        self._key = ""
        self._short = ""
        self._value = Value()
        self._arguments: Arguments | None = None
        self._untold = ""

    @property
    def is_over(self) -> bool:
        return self._at is _At.OVER

    def feed(self, text: str) -> int:
        """Read ``text``; returns how much of it belongs to the call. Raises ``Wrong``."""
        at = 0
        while at < len(text) and self._at is not _At.OVER:
            at = self._step(text, at)
        return at

    def take(self) -> str:
        """The new part of the arguments; ``{}`` at the end of a call without any."""
        untold, self._untold = self._untold, ""
        if self.is_over and self._arguments is None:
            return "{}"
        return untold

    def _step(self, text: str, at: int) -> int:
        match self._at:
            case _At.IN_ARGUMENTS:
                assert self._arguments is not None
                new, at = self._arguments.feed(text, at)
                self._untold += new
                if self._arguments.is_over:
                    self._at = _At.BEHIND_VALUE
                return at
            case _At.IN_KEY | _At.IN_NAME | _At.IN_OTHER:
                return self._in_short(text, at)
            case _At.IN_SCALAR:
                end = _SCALAR_END.search(text, at)
                stop = len(text) if end is None else end.start()
                self._short += text[at:stop]
                self._bound_short(stop)
                if end is not None:
                    if self._key in _ARGUMENT_KEYS and self._short != "null":
                        raise Wrong(stop)
                    self._at = _At.BEHIND_VALUE
                return stop
        mark = text[at]
        if mark in WHITESPACE:
            return at + 1
        match self._at:
            case _At.START if mark == "{":
                self._at = _At.KEY
            case _At.KEY if mark == '"':
                self._begin_short(_At.IN_KEY)
                return at
            case _At.KEY | _At.BEHIND_VALUE if mark == "}" and self.name:
                self._at = _At.OVER
            case _At.BEHIND_VALUE if mark == ",":
                self._at = _At.KEY
            case _At.COLON if mark == ":":
                self._at = _At.VALUE
            case _At.VALUE:
                self._begin_value(mark, at)
                return at
            case _:
                raise Wrong(at + 1)
        return at + 1

    def _begin_value(self, mark: str, at: int) -> None:
        if self._key in _NAME_KEYS:
            if mark != '"' or self.name:
                raise Wrong(at + 1)
            self._begin_short(_At.IN_NAME)
        elif self._key in _ARGUMENT_KEYS and mark in '{"':
            if self._arguments is not None:
                raise Wrong(at + 1)
            self._arguments = Arguments()
            self._at = _At.IN_ARGUMENTS
        elif mark == '"' and self._key in _OTHER_KEYS:
            self._begin_short(_At.IN_OTHER)
        elif mark in '{["' or self._key not in (*_ARGUMENT_KEYS, *_OTHER_KEYS):
            raise Wrong(at + 1)
        else:
            self._short = ""
            self._at = _At.IN_SCALAR

    def _begin_short(self, at: _At) -> None:
        self._short = ""
        self._value = Value()
        self._at = at

    def _in_short(self, text: str, at: int) -> int:
        end = self._value.end_in(text, at)
        stop = end if end >= 0 else len(text)
        self._short += text[at:stop]
        self._bound_short(stop)
        if end < 0:
            return stop
        try:
            short = _decode(self._short)
        except (msgspec.DecodeError, UnicodeError):
            raise Wrong(stop) from None
        if self._at is _At.IN_KEY:
            self._key = short
            self._at = _At.COLON
        else:
            if self._at is _At.IN_NAME:
                if not short or (self._names is not None and short not in self._names):
                    raise Wrong(stop)
                self.name = short
            self._at = _At.BEHIND_VALUE
        return stop

    def _bound_short(self, stop: int) -> None:
        """Apply the same limit however the text was cut into pieces."""
        over = len(self._short) - MAX_SHORT
        if over > 0:
            raise Wrong(stop - over + 1)


class NamedCall:
    """Reads ``name{…}``, with ``[CALL_ID]`` and ``[ARGS]`` in between where a model has them."""

    __slots__ = ("_arguments", "_head", "_untold", "name")

    def __init__(self) -> None:
        self.name = ""
        self._head = ""
        self._arguments: Arguments | None = None
        self._untold = ""

    @property
    def is_over(self) -> bool:
        return self._arguments is not None and self._arguments.is_over

    def feed(self, text: str) -> int:
        """Read ``text``; returns how much of it belongs to the call. Raises ``Wrong``."""
        at = 0
        if self._arguments is None:
            brace = text.find("{")
            at = len(text) if brace < 0 else brace
            self._head += text[:at]
            over = len(self._head) - MAX_SHORT
            if over > 0:
                raise Wrong(at - over + 1)
            if brace < 0:
                return at
            head = _HEAD.fullmatch(self._head)
            if head is None:
                raise Wrong(brace + 1)
            self.name = head[1]
            self._arguments = Arguments()
        self._untold, at = self._arguments.feed(text, at)
        return at

    def take(self) -> str:
        untold, self._untold = self._untold, ""
        return untold


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
        untold, self._untold = self._untold, ""
        return untold

    @abstractmethod
    def _begin(self, text: str, at: int) -> int:
        """Read the beginning of a call."""

    # steps of the formats

    def _object(self, text: str, at: int) -> int:
        """Read the arguments as one JSON object behind space; the call ends with it."""
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
        """Read one of ``tags`` behind space; returns the place and the tag, empty if open."""
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
