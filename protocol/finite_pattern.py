"""The texts that a pattern matches, where there are only a few: ``^(a|b)_[01]$`` has four."""

import re
from collections.abc import Iterable, Iterator
from itertools import product
from re import _constants as of  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

MOST_TEXTS: Final = 64
"""Each becomes a property of a grammar."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand for the anchors while texts are put together."""


class _TooMany(Exception):
    """More texts than are counted, or no end of them."""


def texts_of(pattern: str) -> list[str] | None:
    """All texts in which ``pattern`` is found; None if they are too many or unknown."""
    try:
        parsed = _parser.parse(pattern)
        if parsed.state.flags != re.UNICODE.value:
            return None
        found = list(dict.fromkeys(_sequence(parsed)))
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
    if kind is of.AT and value in (of.AT_BEGINNING, of.AT_END):
        return [_BEGIN if value is of.AT_BEGINNING else _END]
    if kind is of.IN:
        return _few(_letters(value))
    if kind is of.BRANCH:
        return _few(text for branch in value[1] for text in _sequence(branch))
    if kind is of.SUBPATTERN and not (value[1] or value[2]):  # without flags
        return _sequence(value[3])
    if kind in (of.MAX_REPEAT, of.MIN_REPEAT) and value[1] <= MOST_TEXTS:
        least, most, part = value
        return _few(text for n in range(least, most + 1) for text in _sequence([*part] * n))
    raise _TooMany


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
