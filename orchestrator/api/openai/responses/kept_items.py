"""Items as they are kept and listed: each has an id, and a form that is OpenAI's."""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import getsizeof

import msgspec

from orchestrator.api.http.paging import page_of
from orchestrator.api.openai.responses.items import InputItem, Role, text_of, turns_of
from orchestrator.api.openai.responses.output import Item, ItemKind
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message

_MAX_PER_PAGE = 100
_ITEM_BYTES = 128
"""Bytes that keeping an item takes beside its texts."""
_IMAGE = {"type": "input_image", "detail": "auto", "file_id": None, "image_url": None}
"""An image in a list of items: that it was there, without the image itself."""
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""What the ids of items begin with, by type."""


class KeptItem(msgspec.Struct, frozen=True, gc=False):
    """One item of a conversation. A response may be made from tens of thousands."""

    id: str
    type: str
    text: str
    """What a message or a thought says, a call's arguments, or its result."""
    role: Role | None = None
    call_id: str = ""
    name: str = ""
    images: int = 0
    """How many images a message has, beside its text."""

    def body(self) -> dict[str, object]:
        own: dict[str, object]
        match self.type:
            case "message":
                part: dict[str, object] = {"type": "input_text", "text": self.text}
                if self.role == "assistant":
                    part |= {"type": "output_text", "annotations": [], "logprobs": []}
                own = {"role": self.role, "content": [part, *[_IMAGE] * self.images]}
            case "function_call":
                own = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            case "function_call_output":
                own = {"call_id": self.call_id, "output": self.text}
            case _:
                content = [{"type": "reasoning_text", "text": self.text}]
                own = {"summary": [], "content": content}
        return {"id": self.id, "type": self.type, "status": "completed", **own}

    def as_input(self) -> InputItem:
        return InputItem(
            type=self.type,
            role=self.role,
            content=self.text,
            call_id=self.call_id,
            name=self.name,
            arguments=self.text,
            output=self.text,
        )

    @property
    def kept_bytes(self) -> int:
        """Approximate memory that keeping it takes."""
        return _ITEM_BYTES + sum(map(getsizeof, (self.id, self.text, self.call_id, self.name)))


def items_of(turns: Iterable[Message], task_id: str, first: int = 0) -> list[KeptItem]:
    """The items of what a task's model read, from its ``first`` turn on. Their ids follow from
    their turn's place, so that they are the same whenever they are asked for."""
    return [
        item for at, turn in enumerate(turns, first) for item in _of_turn(turn, f"{task_id}i{at}")
    ]


def items_of_input(items: Iterable[InputItem]) -> list[KeptItem]:
    """A client's items with new ids, without those that are passed over."""
    return [_of_input(item, uuid.uuid4().hex) for item in items if _type_of(item) in _PREFIXES]


def turns_of_kept(items: Iterable[KeptItem]) -> tuple[Message, ...]:
    """What a conversation's items say to a model."""
    turns = turns_of([item.as_input() for item in items]).turns
    return turns  # type: ignore[return-value]  # references are not kept


def item_of_output(item: Item) -> KeptItem:
    """An item of a response's output, under its own id."""
    if item.kind is ItemKind.CALL:
        return KeptItem(item.id, "function_call", item.text, None, item.call_id, item.name)
    if item.kind is ItemKind.REASONING:
        return KeptItem(item.id, "reasoning", item.text)
    return KeptItem(item.id, "message", item.text, "assistant")


def page_of_items(items: Sequence[KeptItem], query: Mapping[str, str]) -> dict[str, object]:
    """The page of ``items`` that ``query`` asks for, the latest first unless it says otherwise.
    Raises ``InvalidRequest``."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    listed = items if order == "asc" else items[::-1]
    return page_of(listed, query, most=_MAX_PER_PAGE).body(KeptItem.body)


def _type_of(item: InputItem) -> str:
    return item.type or "message"


def _of_input(item: InputItem, name: str) -> KeptItem:
    kind = _type_of(item)
    match kind:
        case "function_call":
            text = item.arguments
        case "function_call_output":
            text = text_of(item.output)
        case _:
            text = text_of(item.content)
    role = item.role if kind == "message" else None
    return KeptItem(f"{_PREFIXES[kind]}_{name}", kind, text, role, item.call_id, item.name)


def _of_turn(turn: Message, name: str) -> Iterator[KeptItem]:
    if turn.role == "tool":
        yield KeptItem(f"fco_{name}", "function_call_output", turn.content, call_id=turn.call_id)
        return
    if turn.reasoning:
        yield KeptItem(f"rs_{name}", "reasoning", turn.reasoning)
    if turn.content or not turn.calls:
        role = msgspec.convert(turn.role, Role)
        images = len(turn.images)
        yield KeptItem(f"msg_{name}", "message", turn.content, role, images=images)
    for at, call in enumerate(turn.calls):
        arguments = msgspec.json.encode(call.arguments).decode()
        yield KeptItem(
            f"fc_{name}_{at}", "function_call", arguments, call_id=call.id, name=call.name
        )
