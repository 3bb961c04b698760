"""What of a client's own words may stand in an error or a log line."""

import re

MOST_CHARS = 96
MOST_MESSAGE_CHARS = 1000
"""Of a whole error message, whatever it quotes."""


def excerpt(text: object, most: int = MOST_CHARS) -> str:
    """``text`` if it has at most ``most`` characters, else its beginning, an ellipsis last."""
    shown = str(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


_LONG_WORD = re.compile(rf"\S{{{MOST_CHARS + 1},}}")


def brief(message: object) -> str:
    """A whole message, in which every long word, such as a number of a thousand digits, is cut by
    itself: what stands behind it says what to do."""
    shown = str(message)
    if len(shown) > MOST_CHARS:
        shown = _LONG_WORD.sub(lambda word: excerpt(word[0]), shown[: 16 * MOST_MESSAGE_CHARS])
    return excerpt(shown, MOST_MESSAGE_CHARS)
