"""OpenAI's response object and its items: a message, the model's thinking, its tool calls.

The parsed pieces of a model's output fill the items. A stream gets each step as an event, in
OpenAI's order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.api.http.finding import ID_PREFIXES
from orchestrator.api.http.responses import task_fields
from orchestrator.api.openai.responses.tools import Origin
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import error_body, new_call_id
from orchestrator.api.openai.tools import INPUT, free_text
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
from orchestrator.tasks.job import Api
from orchestrator.tasks.task import Task
from protocol import AbortCause, FinishReason

_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.DEADLINE: "deadline"}
"""OpenAI's names for why a response is incomplete. ``deadline`` (``on_deadline``) is ours."""


def response_id(task_id: str) -> str:
    return ID_PREFIXES[Api.RESPONSES] + task_id


def response(
    task: Task,
    asked: ParsedResponses,
    status: str,
    output: Sequence[object] = (),
    *,
    reasoning_tokens: int = 0,
) -> dict[str, object]:
    """A whole response in its current state. Has an outcome if the task has ended."""
    ending = task.ending
    error = ending.error if ending is not None else None
    reason = _INCOMPLETE.get(ending.finish_reason) if status == "incomplete" and ending else None
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
        "output": output,
        "usage": None if ending is None else usage(task, reasoning_tokens),
        "temperature": task.sampling.temperature,
        "top_p": task.sampling.top_p,
        **asked.echo,
        **task_fields(task),
    }


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


Tell = Callable[[str, Mapping[str, object]], None]
"""Receives an event: its type without the prefix ``response.``, and its fields."""
Event = tuple[str, Mapping[str, object]]
"""The arguments of ``Tell``: an event's type and fields."""


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


class OutputItems:
    def __init__(self, tell: Tell, origins: Mapping[str, Origin]) -> None:
        self._origins = origins
        self._task_id = ""
        self._tell = tell
        self._count = 0
        self._open: Item | None = None
        self.items: list[Item] = []

    def begin(self, task_id: str) -> None:
        """Set the task's id. Item ids contain it."""
        self._task_id = task_id

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self._say(ItemKind.MESSAGE, text)
                case Reasoning(text):
                    self._say(ItemKind.REASONING, text)
                case CallBegins(_, name):
                    self.close()
                    self._begin(ItemKind.CALL, name=name, call_id=new_call_id())
                case CallArguments(_, json):
                    self._say(ItemKind.CALL, json)
                case CallEnds():
                    self.close()
                case CallFails(_, text, is_cut):
                    call = self._in(ItemKind.CALL)
                    self.close("incomplete")
                    if not is_cut:  # it is text, not a call
                        self.items.remove(call)
                        self._say(ItemKind.MESSAGE, text)

    def _say(self, kind: ItemKind, text: str) -> None:
        item = self._in(kind)
        item.texts.append(text)
        if item.is_custom:  # its text is sent when it is complete
            return
        delta = {**item.place, "delta": text}
        self._tell(f"{kind}.delta", delta | {"logprobs": []} if kind is ItemKind.MESSAGE else delta)

    def finish(self, status: str) -> None:
        """End the output. Adds an empty message if there is no item."""
        if not self.items:
            self._begin(ItemKind.MESSAGE)
        self.close(status)

    def stop(self) -> None:
        """Mark the open item as incomplete after the output stopped early."""
        if self._open is not None:
            self._open.status = "incomplete"

    def close(self, status: str = "completed") -> None:
        """End the open item with ``status``, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        for event in item.closing():
            self._tell(*event)

    def _in(self, kind: ItemKind) -> Item:
        if self._open is not None and self._open.kind is kind:
            return self._open
        self.close()
        return self._begin(kind)

    def _begin(self, kind: ItemKind, name: str = "", call_id: str = "") -> Item:
        suffix = f"_{self._count}" if self._count else ""
        item = Item(kind, self._count, name, self._origins.get(name), call_id)
        prefix = "ctc" if item.is_custom else _ID_PREFIXES[kind]
        item.id = f"{prefix}_{self._task_id}{suffix}"
        self._count += 1
        self._open = item
        self.items.append(item)
        for event in item.opening():
            self._tell(*event)
        return item
