"""One response in the making: listens to its task, and renders it whole or as OpenAI streams it::

    response.created  response.in_progress
      for each item: response.output_item.added … response.output_item.done, and between them
        message    content_part.added  output_text.delta …  output_text.done  content_part.done
        reasoning  content_part.added  reasoning_text.delta …  reasoning_text.done …
        call       function_call_arguments.delta …  function_call_arguments.done
    response.completed | response.incomplete | response.failed

Each is sent with the first bytes that need it, so that until there is a token an error can still be
an HTTP status (DL-5). All are numbered.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.tools import read_call
from orchestrator.api.openai.responses.output import (
    ItemKind,
    OutputItems,
    logprobs_of,
    response,
    status_of,
)
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import TokenOf
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import Piece, Reasoning
from orchestrator.tasks.job import Message
from orchestrator.tasks.task import Task
from orchestrator.tasks.tools import ToolCall
from protocol import Delta, TokenLogprob


class OutputCollector:
    """Collects a task's output. ``output`` parses it (None: all is text); ``keep`` gets it."""

    def __init__(
        self,
        asked: ParsedResponses,
        output: TaskOutput | None,
        token_of: TokenOf,
        keep: Callable[[Task, "OutputCollector"], None],
    ) -> None:
        self.asked = asked
        self.complete = asyncio.Event()
        self.is_plain = output is None and asked.job.sampling.logprobs is None
        """Whether all of the output is the text of one message."""
        self._items = OutputItems(self._tell, asked.tools.origins)
        self._output = output
        self._token_of = token_of
        self._keep = keep
        self._logprobs: list[object] = []
        """Log-probabilities of tokens whose text is still to come."""
        self._tokens = 0
        self._reasoning_tokens = 0

    # as a listener

    def started(self, task: Task) -> None:
        self._items.begin(task.id)
        if self._output is not None:
            self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        if self.is_plain:
            for text in delta.texts:
                if text:
                    self._items.say(text, [])
            return
        entries: Sequence[TokenLogprob | None] = delta.logprobs or [None] * len(delta.ids)
        for token_id, text, entry in zip(delta.ids, delta.texts, entries, strict=True):
            self._tokens += 1
            if entry is not None:
                self._logprobs += logprobs_of([token_id], [entry], self._token_of)
            if self._output is not None:
                self._add(self._output.feed_token(token_id, text))
            elif text:
                self._say(text)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        self._items.begin(task.id)
        if ending.error is None:
            if self._output is not None:
                self._add(self._output.finish(ending.tail, ending))
            elif ending.tail:
                self._say(ending.tail)
            self._items.finish(status_of(ending), self._logprobs)
        else:
            self._items.stop()
        self._keep(task, self)
        self.complete.set()

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        """Handle an event; the default ignores it."""

    # its current state

    def body(self, task: Task) -> dict[str, object]:
        output = [item.body() for item in self._items.items]
        return response(
            task,
            self.asked,
            status_of(task.ending),
            output,
            reasoning_tokens=self._reasoning_tokens,
        )

    def turns(self) -> tuple[Message, ...]:
        """The turns that this response adds to the conversation."""
        items = self._items.items
        content = "".join([item.text for item in items if item.kind is ItemKind.MESSAGE])
        calls = self._calls()
        if not (content or calls):
            return ()
        thoughts = [item.text for item in items if item.kind is ItemKind.REASONING] if calls else []
        return (Message("assistant", content, calls=calls, reasoning="".join(thoughts)),)

    def _calls(self) -> tuple[ToolCall, ...]:
        calls = []
        for item in self._items.items:
            if item.kind is not ItemKind.CALL or item.status != "completed":
                continue
            try:
                calls.append(read_call(item.call_id, item.name, item.text, "arguments"))
            except InvalidRequest:  # nested too deep for a template
                continue
        return tuple(calls)

    def _add(self, pieces: Sequence[Piece]) -> None:
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self._reasoning_tokens = self._tokens
        self._logprobs = self._items.add(pieces, self._logprobs)

    def _say(self, text: str) -> None:
        logprobs, self._logprobs = self._logprobs, []
        self._items.say(text, logprobs)


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
        """Encoded events to send together."""
        self._number = 0
        self._has_begun = False
        self._before_text = b""
        """Encoded start of a plain message's delta, up to its text; empty before a message."""

    # as a listener

    def tokens(self, task: Task, delta: Delta) -> None:
        if self.is_plain and self._before_text:
            self._stream.send(self._plain_deltas(delta))
            return
        self._begin(task)
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
        self._begin(task)
        super().ended(task)
        status = status_of(ending)
        last = {"response": self.body(task) | {"deadline_budget": str(ending.budget)}}
        self._tell(status if status in ("completed", "incomplete") else "failed", last)
        self._stream.finish(b"".join(self._events))

    # inside

    def _begin(self, task: Task) -> None:
        """Tell the events with which a response begins, once."""
        if not self._has_begun:
            self._has_begun = True
            for kind in ("created", "in_progress"):
                self._tell(kind, {"response": response(task, self.asked, "in_progress")})

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
