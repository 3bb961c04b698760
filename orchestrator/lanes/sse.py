"""Parses server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from typing import Final

MAX_EVENT_BYTES: Final = 4 * 2**20
"""Maximum bytes of an event: far more than any token with its log-probabilities."""
_LINE_COST: Final = 256
"""Memory of a kept line in addition to its bytes, so that empty lines are limited too."""


class EventTooLong(ValueError):
    """An event exceeds the limit."""


class EventReader:
    """Reads the data of one body's events."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._line = bytearray()
        """The received part of an incomplete line."""
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of all events that ``chunk`` completes. Raises ``EventTooLong``."""
        events: list[bytes] = []
        if not chunk:
            return events
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")  # the second half of a line break
        self._after_cr = chunk.endswith(b"\r")
        lines = chunk.splitlines(keepends=True)
        rest = b"" if not lines or lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        for line in lines:
            if self._line:
                line = bytes(self._line + line)
                self._line.clear()
            line = line.rstrip(b"\r\n")
            if self._is_first:
                self._is_first = False
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line) + _LINE_COST
            elif line == b"data":
                self._data.append(b"")
                self._size += _LINE_COST
        self._line += rest
        if len(self._line) + self._size > self._limit:
            raise EventTooLong(f"an event of more than {self._limit} bytes")
        return events
