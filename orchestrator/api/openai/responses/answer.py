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
from collections.abc import Callable, Mapping

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.tools import read_call
from orchestrator.api.openai.responses.output import ItemKind, OutputItems, response, status_of
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import Content, Reasoning
from orchestrator.tasks.job import Message, ToolCall
from orchestrator.tasks.task import Task
from protocol import Delta


class OutputCollector:
    """Collects a task's output. ``output`` parses it (None: all is text); ``keep`` gets it."""

    def __init__(
        self,
        asked: ParsedResponses,
        output: TaskOutput | None,
        keep: Callable[[Task, "OutputCollector"], None],
    ) -> None:
        self.asked = asked
        self.complete = asyncio.Event()
        self._items = OutputItems(self._tell, asked.tools.origins)
        self._output = output
        self._keep = keep
        self._tokens = 0
        self._reasoning_tokens = 0

    # as a listener

    def started(self, task: Task) -> None:
        self._items.begin(task.id)
        if self._output is not None:
            self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        if self._output is None:
            self._items.add([Content(text) for text in delta.texts if text])
            return
        for token_id, text in zip(delta.ids, delta.texts, strict=True):
            self._tokens += 1
            pieces = self._output.feed_token(token_id, text)
            if any(isinstance(piece, Reasoning) for piece in pieces):
                self._reasoning_tokens = self._tokens
            self._items.add(pieces)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        self._items.begin(task.id)
        if ending.error is None:
            if self._output is not None:
                self._items.add(self._output.finish(ending.tail, ending))
            elif ending.tail:
                self._items.add([Content(ending.tail)])
            self._items.finish(status_of(ending))
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


_encode = msgspec.json.Encoder().encode


class ResponseEvents(OutputCollector):
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events."""

    def __init__(
        self,
        stream: EventStream,
        asked: ParsedResponses,
        output: TaskOutput | None,
        keep: Callable[[Task, OutputCollector], None],
    ) -> None:
        super().__init__(asked, output, keep)
        self._stream = stream
        self._events: list[bytes] = []
        """Encoded events to send together."""
        self._number = 0
        self._has_begun = False

    # as a listener

    def tokens(self, task: Task, delta: Delta) -> None:
        self._begin(task)
        super().tokens(task, delta)
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

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        event = f"response.{kind}"
        encoded = _encode({"type": event, "sequence_number": self._number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (event.encode(), encoded))
        self._number += 1
