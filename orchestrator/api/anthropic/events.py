"""A message as Anthropic streams it::

    message_start  (content_block_start  [ping]  content_block_delta …  content_block_stop) …
    message_delta  message_stop

A block is the text; where the model thinks or calls tools, there is one for each of those too.
``ping`` follows the first block's start. Each is sent with the first bytes that need it, so that
until there is a token an error can still be an HTTP status (DL-5). One that comes later is the
event ``error``.
"""

from collections.abc import Iterable

import msgspec

from orchestrator.api.anthropic.shapes import error_body, message, new_call_id, stop, usage
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.responses import task_fields
from orchestrator.parsing import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
    Reasoning,
)
from orchestrator.tasks.task import Task
from protocol import Delta

_encode = msgspec.json.Encoder().encode


class MessageEvents:
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events.
    ``output`` parses what the model writes (None: all of it is text)."""

    def __init__(self, stream: EventStream, request_id: str, output: TaskOutput | None) -> None:
        self._stream = stream
        self._request_id = request_id
        self._output = output
        self._has_message = False
        self._index = -1
        self._open = ""
        """Type of the open block; empty between blocks."""

    # as a listener

    def started(self, task: Task) -> None:
        """Send nothing: until the first token's byte an error can still be a status."""
        if self._output is not None:
            self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        events = self._begin(task)
        if self._output is None:
            events += self._events_of([Content(text) for text in delta.texts if text])
        else:
            events += self._events_of(self._output.feed(delta))
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
        events, is_calling = self._begin(task), False
        if self._output is not None:
            events += self._events_of(self._output.finish(ending.tail, ending))
            is_calling = self._output.is_calling(ending)
        elif ending.tail:
            events += self._events_of([Content(ending.tail)])
        last = {"delta": stop(ending, is_calling=is_calling), "usage": usage(task), **more}
        events += [*self._close(), _event("message_delta", last), _event("message_stop", {})]
        self._stream.finish(b"".join(events))

    # inside

    def _begin(self, task: Task) -> list[bytes]:
        """The event that must precede all others, unless it has been sent."""
        if self._has_message:
            return []
        self._has_message = True
        return [_event("message_start", {"message": message(task, None, [])})]

    def _events_of(self, pieces: Iterable[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._in_block("text", {"text": ""})
                    events.append(self._delta("text_delta", "text", text))
                case Reasoning(text):
                    events += self._in_block("thinking", {"thinking": "", "signature": ""})
                    events.append(self._delta("thinking_delta", "thinking", text))
                case CallBegins(_, name):
                    events += self._close()
                    start: dict[str, object] = {"id": new_call_id(), "name": name, "input": {}}
                    events += self._in_block("tool_use", start)
                    events.append(self._delta("input_json_delta", "partial_json", ""))
                case CallArguments(_, json):
                    events.append(self._delta("input_json_delta", "partial_json", json))
                case CallEnds():
                    events += self._close()
                case CallFails(_, text, is_cut):
                    events += self._close()
                    if not is_cut:  # the client cannot use the part of the call that it has
                        events += self._in_block("text", {"text": ""})
                        events.append(self._delta("text_delta", "text", text))
        return events

    def _in_block(self, kind: str, start: dict[str, object]) -> list[bytes]:
        """Begin a block of that type, unless one is open already."""
        if self._open == kind:
            return []
        events = self._close()
        self._index += 1
        self._open = kind
        block = {"index": self._index, "content_block": {"type": kind, **start}}
        events.append(_event("content_block_start", block))
        if self._index == 0:
            events.append(_event("ping", {}))
        return events

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        events = []
        if self._open == "thinking":  # where Anthropic has one; nothing here needs it
            events.append(self._delta("signature_delta", "signature", ""))
        self._open = ""
        events.append(_event("content_block_stop", {"index": self._index}))
        return events

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        delta = {"index": self._index, "delta": {"type": kind, key: text}}
        return _event("content_block_delta", delta)


def _event(kind: str, value: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind} | value))
