"""Reads server-sent events from a body as it comes: bytes in, events out as slices of them.

An event that came whole, on one line, is a view of the bytes that were fed: nothing is copied. An
event in parts is put together; however a body is cut, the events are the same. Source:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from typing import NamedTuple

MAX_EVENT_BYTES = 4 * 2**20
"""Most bytes of an event: far beyond any token with its log-probabilities."""

_EMPTY = memoryview(b"")
_LINE_COST = 256
"""Bytes that keeping a line takes beside its own, so that empty lines have a bound, too."""


class EventTooLong(ValueError):
    """An event that does not end within the bound."""


class SseEvent(NamedTuple):
    """One event. ``data`` is the lines of that field, joined; ``name`` is empty for ``message``."""

    data: memoryview
    name: bytes = b""


class SseDecoder:
    """Decodes one body. ``feed`` it the chunks as they come; the views that it gives stay valid."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._line = bytearray()
        """The beginning of a line whose end has not come."""
        self._data: list[memoryview] = []
        self._name = b""
        self._owned = 0
        """How many entries of ``_data`` have bytes of their own, and are not views of a chunk."""
        self._size = 0
        self._after_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that ``chunk`` completes. Raises ``EventTooLong``."""
        events: list[SseEvent] = []
        view = memoryview(chunk)
        at, end = 0, len(chunk)
        if self._after_cr and end:
            at = int(chunk[:1] == b"\n")  # the other half of a line's end
            self._after_cr = False
        has_cr = b"\r" in chunk
        newline = -1
        while at < end:
            if newline < at:  # lines that end with a carriage return need no new look
                newline = chunk.find(b"\n", at)
                newline = end if newline < 0 else newline
            stop = newline if newline < end else -1
            if has_cr:
                cr = chunk.find(b"\r", at, end if stop < 0 else stop)
                stop = cr if cr >= 0 else stop
            if stop < 0:
                break
            self._end_line(view[at:stop], events)
            if has_cr and chunk[stop : stop + 1] == b"\r":
                if stop + 1 == end:
                    self._after_cr = True
                elif chunk[stop + 1 : stop + 2] == b"\n":
                    stop += 1
            at = stop + 1
        if at < end:
            self._line += view[at:]
        # A view keeps all of its chunk: what waits for the end of its event has bytes of its own.
        for i in range(self._owned, len(self._data)):
            self._data[i] = memoryview(bytes(self._data[i]))
        self._owned = len(self._data)
        if len(self._line) + self._size > self._limit:
            raise EventTooLong(f"an event of more than {self._limit} bytes")
        return events

    def _end_line(self, line: memoryview, events: list[SseEvent]) -> None:
        if self._line:
            line = memoryview(bytes(self._line) + line)
            self._line.clear()
        if self._is_first:
            self._is_first = False
            if bytes(line[:3]) == b"\xef\xbb\xbf":
                line = line[3:]
        if not line:
            if self._data:
                data = self._data
                joined = data[0] if len(data) == 1 else memoryview(b"\n".join(data))
                events.append(SseEvent(joined, self._name))
            self._data, self._name, self._size, self._owned = [], b"", 0, 0
            return
        head = bytes(line[:6])
        if head[:5] == b"data:":
            value = line[6:] if head[5:] == b" " else line[5:]
            self._data.append(value)
            self._size += len(value) + _LINE_COST
        elif head == b"data":
            self._data.append(_EMPTY)
            self._size += _LINE_COST
        elif head == b"event:":
            self._size -= len(self._name)
            self._name = bytes(line[6:]).removeprefix(b" ")
            self._size += len(self._name)
