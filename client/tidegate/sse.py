"""Incremental parser of server-sent events, per the WHATWG HTML standard, section 9.2.6.

It accepts chunks of bytes, split anywhere, and returns whole events.
"""

import codecs
from dataclasses import dataclass

from tidegate.errors import ProtocolError

MAX_EVENT_SIZE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. A reconnect sends ``last_event_id`` as ``Last-Event-ID``."""

    event: str
    data: str
    last_event_id: str


class SseParser:
    """An incremental parser: ``feed`` takes chunks and returns events.

    ``last_event_id`` is the id of the last complete event. The id of an incomplete event does not
    count, because a reconnect would skip that event. An event without an id does not change it.
    ``retry_ms`` is the reconnect delay that the server sent last, or None.
    """

    def __init__(self, last_event_id: str = "") -> None:
        self.last_event_id = last_event_id
        self.retry_ms: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # drops a BOM
        self._line = ""
        self._after_cr = False
        self._id = last_event_id
        self._event = ""
        self._data: list[str] = []
        self._event_size = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Events that this chunk completes, in order. Raises ``ProtocolError``."""
        events = []
        if text := self._decoder.decode(chunk):
            is_split, self._after_cr = self._after_cr, text.endswith("\r")
            text = text.removeprefix("\n") if is_split else text  # second half of a split CRLF
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line:
                self._event_size += len(line)
                self._field(line)
            elif (event := self._dispatch()) is not None:
                events.append(event)
        if self._event_size + len(self._line) > MAX_EVENT_SIZE:
            raise ProtocolError(
                f"an event grew past {MAX_EVENT_SIZE} characters without a blank line to end it"
            )
        return events

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
        self._event, self._data, self._event_size = "", [], 0
        if not data:
            return None
        return ServerSentEvent(event or "message", "\n".join(data), self.last_event_id)
