"""A response as OpenAI streams it::

    response.created  response.in_progress
      for each item: response.output_item.added … response.output_item.done, and between them
        message    content_part.added  output_text.delta …  output_text.done  content_part.done
        reasoning  content_part.added  reasoning_text.delta …  reasoning_text.done …
        call       function_call_arguments.delta …  function_call_arguments.done
    response.completed | response.incomplete | response.failed

Each is sent with the first bytes that need it, so that until there is a token an error can still be
an HTTP status (DL-5). All are numbered.
"""

from collections.abc import Callable, Mapping

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.openai.responses.answer import OutputCollector
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import TokenOf
from orchestrator.tasks.task import Task
from protocol import Delta

_encode = msgspec.json.Encoder().encode
_DELTA = "response.output_text.delta"


class ResponseEvents(OutputCollector):
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events."""

    def __init__(
        self,
        stream: EventStream,
        asked: ParsedResponses,
        output: TaskOutput | None,
        token_of: TokenOf,
        keep: Callable[[Task, OutputCollector], None],
    ) -> None:
        super().__init__(asked, output, token_of, keep)
        self._stream = stream
        self._events: list[bytes] = []
        """Encoded events that are to be sent together."""
        self._number = 0
        self._before_text = b""
        """Encoded start of a plain message's delta, up to its text; empty until there is a
        message."""

    # as a listener

    def tokens(self, task: Task, delta: Delta) -> None:
        if self.is_plain and self._before_text:
            self._stream.send(self._plain_deltas(delta))
            return
        self._begin(task, "created", "in_progress")
        super().tokens(task, delta)
        if self.is_plain and (message := self._items.open_message) is not None:
            head = _encode({"type": _DELTA, **message.place}).removesuffix(b"}")
            self._before_text = b'event: %b\ndata: %b,"delta":' % (_DELTA.encode(), head)
        events, self._events = b"".join(self._events), []
        self._stream.send(events)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        if ending.error is not None and self._stream.refuse(ending.error):
            super().ended(task)
            return
        self._begin(task, "created", "in_progress")
        self._end(task)
        self._stream.finish(b"".join(self._events))

    # inside

    def _plain_deltas(self, delta: Delta) -> bytes:
        message = self._items.open_message
        assert message is not None
        events = []
        for text in delta.texts:
            if text:
                message.texts.append(text)
                parts = (self._before_text, _encode(text), self._number)
                events.append(b'%b%b,"logprobs":[],"sequence_number":%d}\n\n' % parts)
                self._number += 1
        return b"".join(events)

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        event = f"response.{kind}"
        encoded = _encode({"type": event, "sequence_number": self._number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (event.encode(), encoded))
        self._number += 1
