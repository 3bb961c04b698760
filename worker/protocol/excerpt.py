"""What of a client's own words may stand in an error or a log line."""

MOST_CHARS = 96
MOST_MESSAGE_CHARS = 1000
"""Of a whole error message, whatever it quotes."""


def excerpt(text: object, most: int = MOST_CHARS) -> str:
    """``text`` if it has at most ``most`` characters, else its beginning, an ellipsis last."""
    shown = str(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
