"""Incremental parser of server-sent events, per the WHATWG HTML standard, section 9.2.6.

It accepts chunks of bytes, split anywhere, and returns whole events.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from tidegate.errors import ProtocolError

BOM = b"\xef\xbb\xbf"
DEFAULT_MAX_EVENT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. A reconnect sends ``last_event_id`` as ``Last-Event-ID``."""

    event: str
    data: str
    last_event_id: str


async def received(
    chunks: AsyncIterator[bytes], parser: "SseParser"
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events in ``chunks`` as they arrive. Raises ``ProtocolError``."""
    async for chunk in chunks:
        for event in parser.feed(chunk):
            yield event


class SseParser:
    """An incremental parser: ``feed`` takes chunks and returns events.

    ``last_event_id`` is the id of the last complete event. The id of an incomplete event does not
    count, because a reconnect would skip that event. An event without an id does not change it.
    ``retry_ms`` is the reconnect delay that the server sent last, or None.
    """

    def __init__(
        self, last_event_id: str = "", *, max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES
    ) -> None:
        self.last_event_id = last_event_id
        self.retry_ms: int | None = None
        self._max_event_bytes = max_event_bytes
        self._buffer = b""
        self._at_start = True
        self._after_cr = False
        self._id = last_event_id
        self._event = ""
        self._data: list[str] = []
        self._event_bytes = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Events that this chunk completes, in order. Raises ``ProtocolError``."""
        events = []
        for line in self._lines(chunk):
            if line:
                self._event_bytes += len(line)
                self._field(line.decode("utf-8", "replace"))
            else:
                event = self._dispatch()
                if event is not None:
                    events.append(event)
        if self._event_bytes + len(self._buffer) > self._max_event_bytes:
            raise ProtocolError(
                f"an event grew past {self._max_event_bytes} bytes without a blank line to end it"
            )
        return events

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Lines that are complete now, without their ends (LF, CRLF or CR)."""
        if not chunk:
            return
        if self._after_cr and chunk.startswith(b"\n"):  # second half of a split CRLF
            chunk = chunk[1:]
        self._after_cr = False
        data = self._buffer + chunk
        if self._at_start:
            if len(data) < len(BOM) and BOM.startswith(data):
                self._buffer = data
                return
            data = data.removeprefix(BOM)
            self._at_start = False
        self._after_cr = data.endswith(b"\r")
        *lines, self._buffer = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        yield from lines

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value)
        # the standard ignores all other fields and comments (an empty name)

    def _dispatch(self) -> ServerSentEvent | None:
        self.last_event_id = self._id
        event, data = self._event, self._data
        self._event, self._data, self._event_bytes = "", [], 0
        if not data:
            return None
        return ServerSentEvent(event or "message", "\n".join(data), self.last_event_id)
