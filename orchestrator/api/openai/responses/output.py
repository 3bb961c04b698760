"""OpenAI's response object and its items: a message, the model's thinking, its tool calls.

The parsed pieces of a model's output fill the items. A stream gets each step as an event, in
OpenAI's order.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.api.http.event_stream import EventStream, event_of
from orchestrator.api.http.finding import ID_PREFIXES
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.responses import task_fields
from orchestrator.api.http.tools import read_call
from orchestrator.api.openai.responses.tools import Origin
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import error_body, new_call_id
from orchestrator.api.openai.tools import INPUT, free_text
from orchestrator.errors import InvalidRequest
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
    Reasoning,
)
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api, Message
from orchestrator.tasks.task import Task
from protocol import AbortCause, Delta, FinishReason

_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.DEADLINE: "deadline"}
"""OpenAI's names for why a response is incomplete. ``deadline`` (``on_deadline``) is ours."""


def response_id(task_id: str) -> str:
    return ID_PREFIXES[Api.RESPONSES] + task_id


def status_of(ending: Ending | None) -> str:
    """OpenAI's name for the status of a response."""
    if ending is None:
        return "in_progress"
    if ending.error is not None:
        return "cancelled" if ending.cause is AbortCause.CANCEL else "failed"
    return "incomplete" if ending.finish_reason in _INCOMPLETE else "completed"


def usage(task: Task, reasoning_tokens: int) -> dict[str, object]:
    return {
        "input_tokens": task.prompt_tokens,
        "input_tokens_details": {"cached_tokens": task.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": task.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": task.prompt_tokens + task.completion_tokens,
    }


Event = tuple[str, Mapping[str, object]]
"""An event's type, without the prefix ``response.``, and its fields."""


class ItemKind(StrEnum):
    """Kinds of items. The value is OpenAI's name for the item's text."""

    MESSAGE = "output_text"
    REASONING = "reasoning_text"
    CALL = "function_call_arguments"


_ID_PREFIXES = {ItemKind.MESSAGE: "msg", ItemKind.REASONING: "rs", ItemKind.CALL: "fc"}


@dataclass(slots=True, eq=False)
class Item:
    kind: ItemKind
    index: int
    name: str
    """The model's name for the tool of a call."""
    origin: Origin | None
    """The client's name for the tool, if it differs."""
    call_id: str
    id: str = ""
    texts: list[str] = field(default_factory=list)
    """Pieces of the item's text, or of a call's arguments."""
    status: str = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_custom(self) -> bool:
        """Whether the item is a call with free text instead of arguments."""
        return self.origin is not None and self.origin.is_custom

    @property
    def place(self) -> dict[str, object]:
        """The fields with the position of an event's text in the output."""
        place: dict[str, object] = {"item_id": self.id, "output_index": self.index}
        return place if self.kind is ItemKind.CALL else {**place, "content_index": 0}

    def part(self) -> dict[str, object]:
        """The only content part of a message or of thinking."""
        part: dict[str, object] = {"type": self.kind, "text": self.text}
        if self.kind is ItemKind.MESSAGE:
            part |= {"annotations": [], "logprobs": []}
        return part

    def body(self, *, is_new: bool = False) -> dict[str, object]:
        """The item in the output. ``is_new``: without content."""
        body: dict[str, object] = {"id": self.id, "status": self.status}
        if self.kind is ItemKind.CALL:
            kind = "custom_tool_call" if self.is_custom else "function_call"
            return body | {
                "type": kind,
                "call_id": self.call_id,
                **self._named(),
                **self._stated(),
            }
        if self.kind is ItemKind.MESSAGE:
            body |= {"type": "message", "role": "assistant"}
        else:
            body |= {"type": "reasoning", "summary": []}
        return body | {"content": [] if is_new else [self.part()]}

    def _named(self) -> dict[str, str]:
        if self.origin is None:
            return {"name": self.name}
        name, namespace, _ = self.origin
        return {"name": name} | ({"namespace": namespace} if namespace else {})

    def _stated(self) -> dict[str, object]:
        """A call's arguments, or its free text if that is complete."""
        if not self.is_custom:
            return {"arguments": self.text}
        return {INPUT: "" if self.status == "in_progress" else free_text(self.text)}

    def opening(self) -> Iterator[Event]:
        yield "output_item.added", {"output_index": self.index, "item": self.body(is_new=True)}
        if self.kind is not ItemKind.CALL:
            yield "content_part.added", {**self.place, "part": self.part()}

    def closing(self) -> Iterator[Event]:
        if self.is_custom:
            yield "custom_tool_call_input.delta", {**self.place, "delta": self._stated()[INPUT]}
            yield "custom_tool_call_input.done", {**self.place, **self._stated()}
        elif self.kind is ItemKind.CALL:
            yield f"{self.kind}.done", {**self.place, **self._named(), **self._stated()}
        else:
            more: dict[str, object] = {"logprobs": []} if self.kind is ItemKind.MESSAGE else {}
            yield f"{self.kind}.done", {**self.place, "text": self.text, **more}
            yield "content_part.done", {**self.place, "part": self.part()}
        yield "output_item.done", {"output_index": self.index, "item": self.body()}


class OutputCollector:
    """Collects a task's output as items. ``output`` parses it; ``keep`` receives the result."""

    def __init__(
        self,
        asked: ParsedResponses,
        output: TaskOutput,
        keep: Callable[[Task, "OutputCollector"], None],
    ) -> None:
        self.complete = asyncio.Event()
        self._asked = asked
        self._output = output
        self._keep = keep
        self._items: list[Item] = []
        self._begun = 0
        """Number of items so far, including removed ones."""
        self._open: Item | None = None
        self._tokens = 0
        self._reasoning_tokens = 0

    # as a listener

    def started(self, task: Task) -> None:
        self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        for token_id, text in zip(delta.ids, delta.texts, strict=True):
            self._tokens += 1
            pieces = self._output.feed_token(token_id, text)
            if any(isinstance(piece, Reasoning) for piece in pieces):
                self._reasoning_tokens = self._tokens
            self._add(task, pieces)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        if ending.error is None:
            self._add(task, self._output.finish(ending.tail, ending))
            if not self._items:
                self._begin(task, ItemKind.MESSAGE)
            self._close(status_of(ending))
        elif self._open is not None:
            self._open.status = "incomplete"
        self._keep(task, self)
        self.complete.set()

    # its current state

    def body(self, task: Task, status: str = "") -> dict[str, object]:
        """The whole response. Has an outcome if the task has ended. ``status`` is the task's."""
        asked, ending, status = self._asked, task.ending, status or status_of(task.ending)
        error = None if ending is None else ending.error
        reason = _INCOMPLETE[ending.finish_reason] if ending and status == "incomplete" else None
        took_s = task.marks.ended - task.marks.received
        return {
            "id": response_id(task.id),
            "object": "response",
            "created_at": asked.created_unix,
            "status": status,
            "completed_at": asked.created_unix + round(took_s) if status == "completed" else None,
            "error": None if error is None else error_body(error)["error"],
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": task.served_name,
            "output": [item.body() for item in self._items],
            "usage": None if ending is None else usage(task, self._reasoning_tokens),
            "temperature": task.sampling.temperature,
            "top_p": task.sampling.top_p,
            **asked.echo,
            **task_fields(task),
        }

    def turns(self) -> tuple[Message, ...]:
        """The turns that this response adds to the conversation."""
        content = "".join([item.text for item in self._items if item.kind is ItemKind.MESSAGE])
        calls = []
        for item in self._items:
            if item.kind is ItemKind.CALL and item.status == "completed":
                with suppress(InvalidRequest):  # nested too deeply for a template
                    calls.append(read_call(item.call_id, item.name, item.text, "arguments"))
        if not (content or calls):
            return ()
        thoughts = [item.text for item in self._items if item.kind is ItemKind.REASONING and calls]
        return (Message("assistant", content, calls=tuple(calls), reasoning="".join(thoughts)),)

    # inside

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        """Handle an event. The default does nothing."""

    def _add(self, task: Task, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self._say(task, ItemKind.MESSAGE, text)
                case Reasoning(text):
                    self._say(task, ItemKind.REASONING, text)
                case CallBegins(_, name):
                    self._begin(task, ItemKind.CALL, name, new_call_id())
                case CallArguments(_, json):
                    self._say(task, ItemKind.CALL, json)
                case CallEnds():
                    self._close()
                case CallFails(_, text, is_cut):
                    call = self._in(task, ItemKind.CALL)
                    self._close("incomplete")
                    if not is_cut:  # it is text, not a call
                        self._items.remove(call)
                        self._say(task, ItemKind.MESSAGE, text)

    def _say(self, task: Task, kind: ItemKind, text: str) -> None:
        item = self._in(task, kind)
        item.texts.append(text)
        if item.is_custom:  # its text is sent when it is complete
            return
        delta = {**item.place, "delta": text}
        self._tell(f"{kind}.delta", delta | {"logprobs": []} if kind is ItemKind.MESSAGE else delta)

    def _in(self, task: Task, kind: ItemKind) -> Item:
        """The open item if it is of that kind, otherwise a new one."""
        if self._open is not None and self._open.kind is kind:
            return self._open
        return self._begin(task, kind)

    def _begin(self, task: Task, kind: ItemKind, name: str = "", call_id: str = "") -> Item:
        self._close()
        suffix = f"_{self._begun}" if self._begun else ""
        item = Item(kind, self._begun, name, self._asked.tools.origins.get(name), call_id)
        item.id = f"{'ctc' if item.is_custom else _ID_PREFIXES[kind]}_{task.id}{suffix}"
        self._begun += 1
        self._open = item
        self._items.append(item)
        for event in item.opening():
            self._tell(*event)
        return item

    def _close(self, status: str = "completed") -> None:
        """End the open item with ``status``, if there is one."""
        item, self._open = self._open, None
        if item is not None:
            item.status = status
            for event in item.closing():
                self._tell(*event)


class ResponseEvents(OutputCollector):
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events."""

    def __init__(
        self,
        stream: EventStream,
        asked: ParsedResponses,
        output: TaskOutput,
        keep: Callable[[Task, OutputCollector], None],
    ) -> None:
        super().__init__(asked, output, keep)
        self._stream = stream
        self._events: list[bytes] = []
        """Encoded events that are sent together."""
        self._number = 0

    # as a listener

    def tokens(self, task: Task, delta: Delta) -> None:
        self._tell_begin(task)
        super().tokens(task, delta)
        events, self._events = b"".join(self._events), []
        self._stream.send(events)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        if ending.error is not None and self._stream.refuse(ending.error):
            super().ended(task)
            return
        self._tell_begin(task)
        super().ended(task)
        status = status_of(ending)
        last = {"response": self.body(task) | {"deadline_budget": str(ending.budget)}}
        self._tell(status if status in ("completed", "incomplete") else "failed", last)
        self._stream.finish(b"".join(self._events))

    # inside

    def _tell_begin(self, task: Task) -> None:
        """Emit the first events of a response, once."""
        if not self._number:
            for kind in ("created", "in_progress"):
                self._tell(kind, {"response": self.body(task, "in_progress")})

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        event = f"response.{kind}"
        data = {"type": event, "sequence_number": self._number, **fields}
        self._events.append(event_of(event, data))
        self._number += 1
