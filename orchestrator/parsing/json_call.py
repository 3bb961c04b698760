"""A call as models write it, read as it grows: ``{"name": …, "arguments": {…}}``, or a name and
then its arguments, with marks around it (``MarkedCall``) or without.

On the way, only the ends of things are looked for; whether the arguments are JSON is known at their
end.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Generator
from typing import TypeVar

import msgspec

WHITESPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_HEAD = re.compile(
    r"\s*+([A-Za-z0-9_.:-]++)\s*+(?:\[CALL_ID\]\w*+\s*+)?(?:\[ARGS\]\s*+)?", re.ASCII
)
"""Possessive quantifiers, to prevent backtracking over spaces."""
MAX_SHORT = 256
"""Most characters of a key, a name or another short value. Longer text is not a call."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)
_decode = msgspec.json.Decoder().decode

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads a part of a call, and yields whenever it needs more text."""


class Wrong(ValueError):
    """The text is not a call. ``at`` is after the first character that shows this."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at


class MarkedCall(ABC):
    """One call, read while the model writes it. ``name`` is empty until it is known."""

    def __init__(self) -> None:
        self.name = ""
        self.is_over = False
        self._untold = ""
        self._text = ""
        """The text that is being read, from ``_at`` on."""
        self._at = 0
        self._reading = self._whole()

    def feed(self, text: str) -> int:
        """Read ``text``. Returns the length of the part in the call. Raises ``Wrong``."""
        self._text, self._at = text, 0
        self.is_over = next(self._reading, True) is not None
        return self._at

    def take(self) -> str:
        """The new part of the arguments since the last ``take``, as JSON."""
        untold, self._untold = self._untold, ""
        return untold

    @abstractmethod
    def _whole(self) -> Reading[None]:
        """Read the whole call."""

    # parts of the formats

    def _char(self) -> Reading[str]:
        """The next character, which stays unread."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _behind_space(self) -> Reading[str]:
        """The next character that is not white space, which stays unread."""
        while (char := (yield from self._char())) in WHITESPACE:
            self._at += 1
        return char

    def _tag(self, *tags: str) -> Reading[str]:
        """Read one of ``tags`` after white space."""
        yield from self._behind_space()
        tag = ""
        while tag not in tags:
            tag += yield from self._char()
            self._at += 1
            if not any(each.startswith(tag) for each in tags):
                raise Wrong(self._at)
        return tag

    def _word_up_to(self, ends: str) -> Reading[str]:
        """Read a short text up to one of the characters ``ends``, which stays unread."""
        word = ""
        while (char := (yield from self._char())) not in ends:
            word += char
            self._at += 1
            if len(word) > MAX_SHORT:
                raise Wrong(self._at)
        return word.strip(WHITESPACE)

    def _name_up_to(self, ends: str) -> Reading[str]:
        return self._checked((yield from self._word_up_to(ends)))

    def _checked(self, name: str) -> str:
        """A tool's name, behind which the next character is unread."""
        if not _NAME.fullmatch(name):
            raise Wrong(self._at + 1)
        return name

    def _value(self, most: int = sys.maxsize, *, is_told: bool = False) -> Reading[str]:
        """Read a JSON value of at most ``most`` characters that begins with a bracket or a quote.
        ``is_told``: its parts are parts of the arguments."""
        whole, depth, in_string = "", 0, False
        while not whole or depth or in_string:
            yield from self._char()
            found = (_IN_STRING if in_string else _OUTSIDE).search(self._text, self._at)
            mark, end = ("", len(self._text)) if found is None else (found[0], found.end())
            part, self._at = self._text[self._at : end], end
            if mark == "\\":
                part += yield from self._char()
                self._at += 1
            elif mark == '"':
                in_string = not in_string
            elif mark:
                depth += 1 if mark in "{[" else -1
            whole += part
            if len(whole) > most:
                raise Wrong(self._at - (len(whole) - most) + 1)
            if is_told:
                self._untold += part
        return whole

    def _object(self) -> Reading[None]:
        """Read the arguments: one JSON object after white space."""
        if (yield from self._behind_space()) != "{":
            raise Wrong(self._at + 1)
        yield from self._arguments()

    def _arguments(self) -> Reading[None]:
        """Read the arguments: a JSON object, or such an object in a JSON string."""
        is_string = self._text[self._at] == '"'
        whole = yield from self._value(is_told=not is_string)
        try:
            value = _decode(whole)
            if is_string:
                self._untold += value
                value = _decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise Wrong(self._at) from None
        if not isinstance(value, dict):
            raise Wrong(self._at)


class JsonCall(MarkedCall):
    """Reads a call as one JSON object."""

    def __init__(self, names: Container[str] | None = None) -> None:
        """Text with a tool name that is not in ``names`` is not a call. None: any name."""
        super().__init__()
        self._names = names

    def _whole(self) -> Reading[None]:
        has_arguments = False
        yield from self._tag("{")
        while (yield from self._behind_space()) == '"':
            key = yield from self._short()
            yield from self._tag(":")
            mark = yield from self._behind_space()
            if key == "name" and mark == '"' and not self.name:
                name = yield from self._short()
                if not name or (self._names is not None and name not in self._names):
                    raise Wrong(self._at)
                self.name = name
            elif key in _ARGUMENT_KEYS and mark in '{"' and not has_arguments:
                has_arguments = True
                yield from self._arguments()
            elif key in _OTHER_KEYS and mark == '"':
                yield from self._short()
            elif key in (*_ARGUMENT_KEYS, *_OTHER_KEYS) and mark not in '{["':
                scalar = yield from self._word_up_to(",}" + WHITESPACE)
                if key in _ARGUMENT_KEYS and scalar != "null":
                    raise Wrong(self._at)
            else:
                raise Wrong(self._at + 1)
            if (yield from self._behind_space()) != ",":
                break
            self._at += 1
        self._at += 1
        if self._text[self._at - 1] != "}" or not self.name:
            raise Wrong(self._at)
        if not has_arguments:
            self._untold = "{}"

    def _short(self) -> Reading[str]:
        word = yield from self._value(MAX_SHORT)
        try:
            text: str = _decode(word)
        except (msgspec.DecodeError, UnicodeError):
            raise Wrong(self._at) from None
        return text


class ListedCall(JsonCall):
    """Reads the first call of a list, or a single call as one JSON object. If it ``may_be_named``,
    the single call may also be ``name{…}``, with ``[CALL_ID]`` and ``[ARGS]`` in between."""

    def __init__(self, *, may_be_named: bool) -> None:
        super().__init__()
        self._may_be_named = may_be_named
        self.is_in_list = False

    def _whole(self) -> Reading[None]:
        mark = yield from self._behind_space()
        if mark == "[":
            self.is_in_list = True
            self._at += 1
        elif mark != "{" and self._may_be_named:
            head = _HEAD.fullmatch((yield from self._word_up_to("{")))
            if head is None:
                raise Wrong(self._at + 1)
            self.name = head[1]
            yield from self._object()
            return
        yield from super()._whole()
