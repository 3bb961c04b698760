"""A message as Anthropic streams it::

    message_start  (content_block_start  ping  content_block_delta …  content_block_stop)
    message_delta  message_stop

Each is sent with the first bytes that need it, so that until there is a token an error can still be
an HTTP status (DL-5). One that comes later is the event ``error``.
"""

import msgspec

from orchestrator.api.anthropic.errors import error_body
from orchestrator.api.anthropic.shapes import message, stop, usage
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import task_fields
from orchestrator.tasks.task import Task
from worker.protocol import Delta

_encode = msgspec.json.Encoder().encode

_BEFORE_TEXT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)
_AFTER_TEXT = b"}}\n\n"


class MessageEvents:
    """Turns one task's tokens into events. Hears the task; ``stream`` carries them away."""

    def __init__(self, stream: EventStream, request_id: str) -> None:
        self._stream = stream
        self._request_id = request_id
        self._has_message = False
        self._has_block = False

    # as a listener

    def started(self, task: Task) -> None:
        """Nothing to send: the first byte is the first token's, so that errors stay a status."""

    def tokens(self, task: Task, delta: Delta) -> None:
        events = [_BEFORE_TEXT + _encode(text) + _AFTER_TEXT for text in delta.texts if text]
        if not self._has_block:
            events.insert(0, self._begin(task, has_text=bool(events)))
        self._stream.send(b"".join(events))

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        more = {"deadline_budget": str(ending.budget), **task_fields(task)}
        if ending.error is not None:
            if not self._stream.refuse(ending.error):
                self._stream.finish(
                    _event("error", error_body(ending.error, self._request_id) | more)
                )
            return
        events = [self._begin(task, has_text=bool(ending.tail))]
        if ending.tail:
            events.append(_BEFORE_TEXT + _encode(ending.tail) + _AFTER_TEXT)
        if self._has_block:
            events.append(_event("content_block_stop", {"index": 0}))
        last = {"delta": stop(ending), "usage": usage(task), **more}
        events += [_event("message_delta", last), _event("message_stop", {})]
        self._stream.finish(b"".join(events))

    # inside

    def _begin(self, task: Task, *, has_text: bool) -> bytes:
        """What has to come before more, as far as it has not."""
        events = b""
        if not self._has_message:
            self._has_message = True
            events += _event("message_start", {"message": message(task, None, [])})
        if has_text and not self._has_block:
            self._has_block = True
            block = {"index": 0, "content_block": {"type": "text", "text": ""}}
            events += _event("content_block_start", block) + _event("ping", {})
        return events


def _event(kind: str, value: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind} | value))
