"""The texts that a pattern matches, where there are only a few: ``^(a|b)_[01]$`` has four."""

import re
import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from re import _constants as of  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

MOST_TEXTS: Final = 64
"""Each becomes a property of a grammar."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand for the anchors while texts are put together."""
_ANCHORS: Final = {
    **dict.fromkeys((of.AT_BEGINNING, of.AT_BEGINNING_STRING), _BEGIN),
    **dict.fromkeys((of.AT_END, of.AT_END_STRING), _END),
}
_FOLDS: Final = re.IGNORECASE.value
_RUSTS_END: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\z")
"""An anchor that Python spells otherwise."""


class _TooMany(Exception):
    """More texts than are counted, or no end of them."""


def texts_of(pattern: str) -> list[str] | None:
    """All texts in which ``pattern`` is found; None if they are too many or unknown."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what others read otherwise
            parsed = _parser.parse(_RUSTS_END.sub(r"\1\\Z", pattern))
        flags = parsed.state.flags & ~re.UNICODE.value
        if flags & ~_FOLDS:
            return None
        found = list(dict.fromkeys(_folded(_sequence(parsed), flags)))
    except (_TooMany, re.error, RecursionError, OverflowError):
        return None
    texts = []
    for text in found:
        inner = text.removeprefix(_BEGIN).removesuffix(_END)
        if len(inner) != len(text) - 2 or _BEGIN in inner or _END in inner:
            return None  # something may be around it
        texts.append(inner)
    return texts


def _sequence(parts: Iterable[Any]) -> list[str]:
    texts = [""]
    for part in parts:
        texts = _few(a + b for a, b in product(texts, _texts(*part)))
    return texts


def _texts(kind: Any, value: Any) -> list[str]:
    """Texts of one part, as ``re`` has parsed it."""
    if kind is of.LITERAL:
        return [chr(value)]
    if kind is of.AT and value in _ANCHORS:
        return [_ANCHORS[value]]
    if kind is of.IN:
        return _few(_letters(value))
    if kind is of.BRANCH:
        return _few(text for branch in value[1] for text in _sequence(branch))
    if kind is of.SUBPATTERN and not (value[1] & ~_FOLDS or value[2]):
        return _folded(_sequence(value[3]), value[1])
    if kind in (of.MAX_REPEAT, of.MIN_REPEAT) and value[1] <= MOST_TEXTS:
        least, most, part = value
        return _few(text for n in range(least, most + 1) for text in _sequence([*part] * n))
    raise _TooMany


def _folded(texts: list[str], flags: int) -> list[str]:
    """The texts in upper and lower case, where ``flags`` say that it does not matter."""
    if not flags:
        return texts
    each = (product(*[{c.lower(): 0, c.upper(): 0} for c in text]) for text in texts)
    return _few("".join(letters) for several in each for letters in several)


def _letters(members: Iterable[Any]) -> Iterator[str]:
    for kind, value in members:
        if kind is of.LITERAL:
            yield chr(value)
        elif kind is of.RANGE:
            yield from map(chr, range(value[0], value[1] + 1))
        elif kind is of.CATEGORY and value is of.CATEGORY_DIGIT:
            yield from "0123456789"
        else:
            raise _TooMany


def _few(texts: Iterable[str]) -> list[str]:
    found: list[str] = []
    for text in texts:
        if len(found) == MOST_TEXTS:
            raise _TooMany
        found.append(text)
    return found
