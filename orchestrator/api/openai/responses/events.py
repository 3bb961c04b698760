"""A response as OpenAI streams it::

    response.created  response.in_progress
      (response.output_item.added  response.content_part.added  response.output_text.delta …
       response.output_text.done  response.content_part.done  response.output_item.done)
    response.completed | response.incomplete | response.failed

Each is sent with the first bytes that need it, so that until there is a token an error can still be
an HTTP status (DL-5). All are numbered.
"""

from collections.abc import Callable, Mapping

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.openai.responses.answer import Answer
from orchestrator.api.openai.responses.shapes import (
    logprobs_of,
    message_id,
    message_item,
    response,
    status_of,
    text_part,
)
from orchestrator.api.openai.responses.types import ParsedRequest
from orchestrator.api.openai.shapes import TokenOf
from orchestrator.tasks.task import Task
from worker.protocol import Delta

_encode = msgspec.json.Encoder().encode


class ResponseEvents(Answer):
    """Turns one task's tokens into events. Hears the task; ``stream`` carries them away."""

    def __init__(
        self,
        stream: EventStream,
        asked: ParsedRequest,
        token_of: TokenOf,
        keep: Callable[[Task, Answer], None],
    ) -> None:
        super().__init__(asked, token_of, keep)
        self._stream = stream
        self._number = 0
        self._has_begun = False
        self._before_text = b""
        """Of a delta, what stands before its text; empty until there is a message."""

    # as a listener

    def tokens(self, task: Task, delta: Delta) -> None:  # type: ignore[override]
        super().tokens(task, delta)
        events = self._begin(task)
        if delta.logprobs is not None:
            for token_id, text, entry in zip(delta.ids, delta.texts, delta.logprobs, strict=True):
                logprobs = logprobs_of([token_id], [entry], self._token_of)
                events += self._text_delta(task, text, _encode(logprobs))
        else:
            for text in delta.texts:
                if text:
                    events += self._text_delta(task, text)
        self._stream.send(events)

    def ended(self, task: Task) -> None:  # type: ignore[override]
        super().ended(task)
        ending = task.ending
        assert ending is not None
        if ending.error is not None and self._stream.refuse(ending.error):
            return
        events = self._begin(task)
        if ending.error is None:
            if ending.tail:
                events += self._text_delta(task, ending.tail)
            events += self._end_message(task)
        last = self.body(task) | {"deadline_budget": str(ending.budget)}
        status = status_of(ending)
        kind = status if status in ("completed", "incomplete") else "failed"
        events += self._event(f"response.{kind}", {"response": last})
        self._stream.finish(events)

    # inside

    def _begin(self, task: Task) -> bytes:
        """What comes before all else, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        begun = {"response": response(task, self.asked, "in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def _text_delta(self, task: Task, text: str, logprobs: bytes = b"[]") -> bytes:
        begin = b"" if self._before_text else self._begin_message(task)
        number, self._number = self._number, self._number + 1
        return begin + b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (
            self._before_text,
            _encode(text),
            logprobs,
            number,
        )

    def _begin_message(self, task: Task) -> bytes:
        place = {"item_id": message_id(task.id), "output_index": 0, "content_index": 0}
        kind = "response.output_text.delta"
        self._before_text = b'event: %b\ndata: %b,"delta":' % (
            kind.encode(),
            _encode({"type": kind, **place}).removesuffix(b"}"),
        )
        item = {"output_index": 0, "item": message_item(task, "in_progress")}
        return self._event("response.output_item.added", item) + self._event(
            "response.content_part.added", place | {"part": text_part("")}
        )

    def _end_message(self, task: Task) -> bytes:
        """The message is whole; one without any text begins here too."""
        begin = b"" if self._before_text else self._begin_message(task)
        item = self.message(task)
        part = self.text_part(task)
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        done = place | {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            begin
            + self._event("response.output_text.done", done)
            + self._event("response.content_part.done", place | {"part": part})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
        )

    def _event(self, kind: str, value: Mapping[str, object]) -> bytes:
        number, self._number = self._number, self._number + 1
        body = {"type": kind, "sequence_number": number, **value}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(body))
