"""Where a marker begins in a text that comes a piece at a time."""

from orchestrator.parsing.json_call import WHITESPACE


def begun(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``, but not all
    of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def certain(text: str, marker: str) -> int:
    """Up to where ``text`` neither can belong to ``marker`` nor is space in front of it."""
    end = len(text) - begun(text, marker)
    return len(text[:end].rstrip(WHITESPACE))
