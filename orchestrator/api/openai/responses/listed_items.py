"""Lists the items that a response was made from: each has an id, and OpenAI's form."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from orchestrator.api.http.paging import page_of
from orchestrator.api.openai.responses.items import Role
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message

_MAX_PER_PAGE = 100
_IMAGE = {"type": "input_image", "detail": "auto", "file_id": None, "image_url": None}
"""An image in a list of items: that it was there, without the image itself."""


class ListedItem(msgspec.Struct, frozen=True, gc=False):
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


def items_of(turns: Iterable[Message], task_id: str) -> list[ListedItem]:
    """The items of what a task's model read. Their ids follow from their turn's place, so that they
    are the same whenever they are asked for."""
    return [item for at, turn in enumerate(turns) for item in _of_turn(turn, f"{task_id}i{at}")]


def page_of_items(items: Sequence[ListedItem], query: Mapping[str, str]) -> dict[str, object]:
    """The page of ``items`` that ``query`` asks for, the latest first unless it says otherwise.
    Raises ``InvalidRequest``."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    listed = items if order == "asc" else items[::-1]
    return page_of(listed, query, most=_MAX_PER_PAGE).told(ListedItem.body)


def _of_turn(turn: Message, name: str) -> Iterator[ListedItem]:
    if turn.role == "tool":
        yield ListedItem(f"fco_{name}", "function_call_output", turn.content, call_id=turn.call_id)
        return
    if turn.reasoning:
        yield ListedItem(f"rs_{name}", "reasoning", turn.reasoning)
    if turn.content or not turn.calls:
        role = msgspec.convert(turn.role, Role)
        images = len(turn.images)
        yield ListedItem(f"msg_{name}", "message", turn.content, role, images=images)
    for at, call in enumerate(turn.calls):
        arguments = msgspec.json.encode(call.arguments).decode()
        yield ListedItem(
            f"fc_{name}_{at}", "function_call", arguments, call_id=call.id, name=call.name
        )
