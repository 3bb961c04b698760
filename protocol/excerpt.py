"""Shortens clients' text for error messages and log lines."""

import re

MAX_CHARS = 96
MAX_MESSAGE_CHARS = 1000
"""Maximum characters of a whole error message, including quoted text."""


def excerpt(text: object, most: int = MAX_CHARS) -> str:
    """``text`` if it has at most ``most`` characters; otherwise its beginning and an ellipsis."""
    shown = str(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


_LONG_WORD = re.compile(rf"\S{{{MAX_CHARS + 1},}}")


def brief(message: object) -> str:
    """A whole message in which each long word, such as a number of a thousand digits, is shortened
    separately, because the text after it says what to do."""
    shown = str(message)
    if len(shown) > MAX_CHARS:
        shown = _LONG_WORD.sub(lambda word: excerpt(word[0]), shown[: 16 * MAX_MESSAGE_CHARS])
    return excerpt(shown, MAX_MESSAGE_CHARS)
