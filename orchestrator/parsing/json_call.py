"""A call as models write it, read as it grows: ``{"name": …, "arguments": {…}}``, or a name and
then its arguments, with marks around it (``MarkedCall``) or without.

On the way, only the ends of things are looked for; whether the arguments are JSON is known at their
end.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container

import msgspec

WHITESPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\s]")
_HEAD = re.compile(
    r"\s*+([A-Za-z0-9_.:-]++)\s*+(?:\[CALL_ID\]\w*+\s*+)?(?:\[ARGS\]\s*+)?", re.ASCII
)
"""Possessive quantifiers, to prevent backtracking over spaces."""
MAX_SHORT = 256
"""Most characters of a key, a name or another short value. Longer text is not a call."""
_decode = msgspec.json.Decoder().decode


class Value:
    """Finds the end of one JSON value that begins with a bracket or a quote."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str, at: int = 0) -> int:
        """Index in ``text`` after the value, which continues at ``at``; -1 if it is incomplete."""
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
    """The text is not a call. ``at`` is after the first character that shows this."""

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
        """Continue at ``at``. Returns the new JSON and its end in ``text``. Raises ``Wrong``."""
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


_NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)


class MarkedCall(ABC):
    """One call, read while the model writes it. ``name`` is empty until it is known."""

    def __init__(self) -> None:
        self.name = ""
        self.is_over = False
        self._untold = ""
        self._mark = ""
        """The part of a marker that was read."""
        self._word = ""
        """The part of a name or another short value that was read."""
        self._arguments = Arguments()
        self._read: Callable[[str, int], int] = self._begin
        """Reads a text from an index, and returns the index after the part that it read."""

    def feed(self, text: str) -> int:
        """Read ``text``. Returns the length of the part in the call. Raises ``Wrong``."""
        at = 0
        while at < len(text) and not self.is_over:
            at = self._read(text, at)
        return at

    def take(self) -> str:
        """The new part of the arguments since the last ``take``, as JSON."""
        untold, self._untold = self._untold, ""
        return untold

    @abstractmethod
    def _begin(self, text: str, at: int) -> int:
        """Read the start of a call."""

    # steps of the formats

    def _object(self, text: str, at: int) -> int:
        """Read the arguments: one JSON object after white space. The call ends with it."""
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
        """Read one of ``tags`` after white space. Returns the index and the tag; empty: not yet."""
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
        """Read a name up to one of the characters ``ends``, which stays unread. Returns the index
        and the name; None if it is incomplete."""
        found = [end for char in ends if (end := text.find(char, at)) >= 0]
        stop = min(found, default=len(text))
        self._extend(text[at:stop], stop)
        if not found:
            return stop, None
        word, self._word = self._word, ""
        return stop, word.strip(WHITESPACE)

    def _extend(self, more: str, stop: int) -> None:
        """Add to the word. Its limit does not depend on how the text was split into pieces."""
        self._word += more
        over = len(self._word) - MAX_SHORT
        if over > 0:
            raise Wrong(stop - over + 1)

    def _checked(self, name: str, at: int) -> str:
        """A tool's ``name`` that ends at ``at``. Raises ``Wrong`` if it is not valid."""
        if not _NAME.fullmatch(name):
            raise Wrong(at + 1)
        return name


class JsonCall(MarkedCall):
    """Reads a call as one JSON object."""

    def __init__(self, names: Container[str] | None = None) -> None:
        """Text with a tool name that is not in ``names`` is not a call. None: any name."""
        super().__init__()
        self._names = names
        self._key = ""
        self._value = Value()

    def _begin(self, text: str, at: int) -> int:
        at, mark = self._tag(text, at, ("{",))
        if mark:
            self._read = self._before_key
        return at

    def _before_key(self, text: str, at: int) -> int:
        at = self._behind_space(text, at)
        if text[at : at + 1] == '"':
            self._begin_short(self._in_key)
            return at
        return self._end(text, at)

    def _behind_value(self, text: str, at: int) -> int:
        at = self._behind_space(text, at)
        if text[at : at + 1] == ",":
            self._read = self._before_key
            return at + 1
        return self._end(text, at)

    def _end(self, text: str, at: int) -> int:
        if at < len(text):
            at += 1
            if text[at - 1] != "}" or not self.name:
                raise Wrong(at)
            self.is_over = True
            if not self._arguments.has_begun:
                self._untold = "{}"
        return at

    def _in_key(self, text: str, at: int) -> int:
        at, key = self._short(text, at)
        if key is not None:
            self._key = key
            self._read = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        at, mark = self._tag(text, at, (":",))
        if mark:
            self._read = self._before_value
        return at

    def _before_value(self, text: str, at: int) -> int:
        at = self._behind_space(text, at)
        if at == len(text):
            return at
        mark, key = text[at], self._key
        if key == "name" and mark == '"' and not self.name:
            self._begin_short(self._in_name)
        elif key in _ARGUMENT_KEYS and mark in '{"' and not self._arguments.has_begun:
            self._read = self._in_arguments
        elif key in _OTHER_KEYS and mark == '"':
            self._begin_short(self._in_other)
        elif key in (*_ARGUMENT_KEYS, *_OTHER_KEYS) and mark not in '{["':
            self._read = self._in_scalar
        else:
            raise Wrong(at + 1)
        return at

    def _in_name(self, text: str, at: int) -> int:
        at, name = self._short(text, at)
        if name is not None:
            if not name or (self._names is not None and name not in self._names):
                raise Wrong(at)
            self.name = name
            self._read = self._behind_value
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        new, at = self._arguments.feed(text, at)
        self._untold += new
        if self._arguments.is_over:
            self._read = self._behind_value
        return at

    def _in_other(self, text: str, at: int) -> int:
        at, other = self._short(text, at)
        if other is not None:
            self._read = self._behind_value
        return at

    def _in_scalar(self, text: str, at: int) -> int:
        end = _SCALAR_END.search(text, at)
        stop = len(text) if end is None else end.start()
        self._extend(text[at:stop], stop)
        if end is not None:
            scalar, self._word = self._word, ""
            if self._key in _ARGUMENT_KEYS and scalar != "null":
                raise Wrong(stop)
            self._read = self._behind_value
        return stop

    def _begin_short(self, read: Callable[[str, int], int]) -> None:
        self._value = Value()
        self._read = read

    def _short(self, text: str, at: int) -> tuple[int, str | None]:
        """Read a short string. Returns the index and the string; None if it is incomplete."""
        end = self._value.end_in(text, at)
        stop = end if end >= 0 else len(text)
        self._extend(text[at:stop], stop)
        if end < 0:
            return stop, None
        word, self._word = self._word, ""
        try:
            return stop, _decode(word)
        except (msgspec.DecodeError, UnicodeError):
            raise Wrong(stop) from None


class NamedCall(MarkedCall):
    """Reads ``name{…}``, with ``[CALL_ID]`` and ``[ARGS]`` in between if the model writes them."""

    def _begin(self, text: str, at: int) -> int:
        at, head = self._word_up_to(text, at, "{")
        if head is not None:
            found = _HEAD.fullmatch(head)
            if found is None:
                raise Wrong(at + 1)
            self.name = found[1]
            self._read = self._object
        return at
