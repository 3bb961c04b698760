"""The texts that a pattern matches, where there are only a few: ``^(a|b)_[01]$`` has four."""

import re
import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from re import _constants as of  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

MOST_TEXTS: Final = 64
"""Texts that are counted if no other bound is given. Each becomes a property of a grammar."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand for the anchors while texts are put together."""
_ANCHORS: Final = {
    **dict.fromkeys((of.AT_BEGINNING, of.AT_BEGINNING_STRING), _BEGIN),
    **dict.fromkeys((of.AT_END, of.AT_END_STRING), _END),
}
_FOLDS: Final = re.IGNORECASE.value
_KNOWN_FLAGS: Final = _FOLDS | re.DOTALL.value
_OPPOSITES: Final = (
    {of.CATEGORY_DIGIT, of.CATEGORY_NOT_DIGIT},
    {of.CATEGORY_SPACE, of.CATEGORY_NOT_SPACE},
    {of.CATEGORY_WORD, of.CATEGORY_NOT_WORD},
)
_RUSTS_END: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\z")
"""An anchor that Python spells otherwise."""
_NAMED: Final = re.compile(r"(?<!\\)((?:\\\\)*)\(\?<(?=\w)")
"""The begin of a named group, as JavaScript spells it."""


class _TooMany(Exception):
    """More texts than are counted, or no end of them."""


def texts_of(pattern: str, most: int = MOST_TEXTS) -> list[str] | None:
    """All texts in which ``pattern`` is found; None if they are more than ``most``, or unknown."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what others read otherwise
            parsed = _parsed(pattern)
        flags = parsed.state.flags & ~re.UNICODE.value
        if flags & ~_KNOWN_FLAGS:
            return None
        counting = _Counting(most)
        found = list(dict.fromkeys(counting.folded(counting.sequence(parsed), flags)))
    except (_TooMany, re.error, RecursionError, OverflowError):
        return None
    texts = []
    for text in found:
        inner = text.removeprefix(_BEGIN).removesuffix(_END)
        if len(inner) != len(text) - 2 or _BEGIN in inner or _END in inner:
            return None  # something may be around it
        texts.append(inner)
    return texts


def _parsed(pattern: str) -> Any:
    pattern = _RUSTS_END.sub(r"\1\\Z", pattern)
    try:
        return _parser.parse(pattern)
    except re.error:
        return _parser.parse(_NAMED.sub(r"\1(?P<", pattern))


class _Counting:
    """Counts the texts of parts of a pattern, up to ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most

    def sequence(self, parts: Iterable[Any]) -> list[str]:
        texts = [""]
        for part in parts:
            texts = self._few(a + b for a, b in product(texts, self._texts(*part)))
        return texts

    def folded(self, texts: list[str], flags: int) -> list[str]:
        """The texts in upper and lower case, where ``flags`` say that it does not matter."""
        if not flags & _FOLDS:
            return texts
        each = (product(*[{c.lower(): 0, c.upper(): 0} for c in text]) for text in texts)
        return self._few("".join(letters) for several in each for letters in several)

    def _texts(self, kind: Any, value: Any) -> list[str]:
        """Texts of one part, as ``re`` has parsed it."""
        if kind is of.LITERAL:
            return [chr(value)]
        if kind is of.AT and value in _ANCHORS:
            return [_ANCHORS[value]]
        if kind is of.IN:
            return self._few(_letters(value))
        if kind is of.BRANCH:
            return self._few(text for branch in value[1] for text in self.sequence(branch))
        if kind is of.SUBPATTERN and not (value[1] & ~_KNOWN_FLAGS or value[2]):
            return self.folded(self.sequence(value[3]), value[1])
        if kind in (of.MAX_REPEAT, of.MIN_REPEAT) and value[1] <= self._most:
            least, most, part = value
            return self._few(
                text for n in range(least, most + 1) for text in self.sequence([*part] * n)
            )
        raise _TooMany

    def _few(self, texts: Iterable[str]) -> list[str]:
        found: list[str] = []
        for text in texts:
            if len(found) == self._most:
                raise _TooMany
            found.append(text)
        return found


def _letters(members: list[Any]) -> Iterator[str]:
    if members[0][0] is of.NEGATE:
        kinds = {value for kind, value in members if kind is of.CATEGORY}
        if any(both <= kinds for both in _OPPOSITES):
            return
    for kind, value in members:
        if kind is of.LITERAL:
            yield chr(value)
        elif kind is of.RANGE:
            yield from map(chr, range(value[0], value[1] + 1))
        elif kind is of.CATEGORY and value is of.CATEGORY_DIGIT:
            yield from "0123456789"
        else:
            raise _TooMany
