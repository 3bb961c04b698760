"""Shortens a client's own words for error messages and log lines."""

import re

MOST_CHARS = 96
MOST_MESSAGE_CHARS = 1000
"""Most characters of a whole error message, whatever it quotes."""


def excerpt(text: object, most: int = MOST_CHARS) -> str:
    """``text`` if it has at most ``most`` characters, else its beginning, an ellipsis last."""
    shown = str(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


_LONG_WORD = re.compile(rf"\S{{{MOST_CHARS + 1},}}")


def brief(message: object) -> str:
    """A whole message in which each long word, such as a number of a thousand digits, is shortened
    separately, since what follows it says what to do."""
    shown = str(message)
    if len(shown) > MOST_CHARS:
        shown = _LONG_WORD.sub(lambda word: excerpt(word[0]), shown[: 16 * MOST_MESSAGE_CHARS])
    return excerpt(shown, MOST_MESSAGE_CHARS)
