"""The items that a conversation is made of, as the Responses API has them.

What a client sends back of an earlier answer has whatever its SDK keeps beside the text; only what
is read here matters.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from orchestrator.api.http.tools import read_call
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message
from worker.protocol import excerpt

_BETWEEN_INSTRUCTIONS = "\n\n"
_SERVED = "message, function_call, function_call_output, reasoning, item_reference"


class InputText(msgspec.Struct, frozen=True, tag="input_text", tag_field="type", gc=False):
    """Text of anybody's."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type", gc=False):
    """Text of the assistant's."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal", tag_field="type", gc=False):
    """What another service's model answered instead."""

    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type", gc=False):
    """What a model was thinking."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text", tag_field="type", gc=False):
    """What a model was thinking, in short."""

    text: str


Part = InputText | OutputText | Refusal | ReasoningText | SummaryText


class InputItem(msgspec.Struct, frozen=True, gc=False):
    """One item of any type. A body may have so many that the collector would be the dearest part.

    A message may come without its ``type``.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | tuple[Part, ...] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | tuple[Part, ...] = ""


class Reference(NamedTuple):
    """An item of an earlier answer, by its id."""

    item_id: str

    @property
    def task_id(self) -> str:
        """Of the task that made the answer: items are named after it."""
        parts = self.item_id.split("_")
        return parts[1] if len(parts) > 1 else ""


Turn = Message | Reference


def turns_of(items: str | Sequence[InputItem]) -> tuple[Turn, ...]:
    """A conversation's turns. Raises ``InvalidRequest`` for what is not served."""
    if isinstance(items, str):
        return (Message("user", items),)
    reader = _Reader()
    for at, item in enumerate(items):
        reader.read(item, f"input[{at}]")
    return tuple(reader.turns)


class _Reader:
    """Makes turns of items: what a model said and called in one go is one turn."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._thought = ""

    def read(self, item: InputItem, where: str) -> None:
        match item.type:
            case "message":
                self.turns.append(_message(item, where))
            case "function_call":
                self._call(item, where)
                return
            case "function_call_output":
                text = _text_of(item.output)
                self.turns.append(Message("tool", text, call_id=item.call_id))
            case "reasoning":
                # Left out, as templates do with earlier turns, unless the model called tools then.
                self._thought = _text_of(item.content or ())
                return
            case "item_reference":
                self.turns.append(Reference(item.id or ""))
            case _:
                raise InvalidRequest(
                    f"{where}.type: {excerpt(item.type, 64)} is not served here; expected one of: "
                    f"{_SERVED}",
                    field=f"{where}.type",
                )
        if item.role != "assistant":
            self._thought = ""

    def _call(self, item: InputItem, where: str) -> None:
        call = read_call(item.call_id, item.name, item.arguments, f"{where}.arguments")
        last = self.turns[-1] if self.turns else None
        if isinstance(last, Message) and last.role == "assistant":
            calls = (*last.calls, call)
            reasoning = last.reasoning or self._thought
            self.turns[-1] = structs.replace(last, calls=calls, reasoning=reasoning)
        else:
            self.turns.append(Message("assistant", "", calls=(call,), reasoning=self._thought))


def conversation(instructions: str | None, history: Sequence[Message]) -> tuple[Message, ...]:
    """All that the model is to read. Instructions that follow each other at the beginning become
    one message, which is all that many chat templates take.
    """
    messages = _with_names(list(history))
    first = next((at for at, m in enumerate(messages) if m.role != "system"), len(messages))
    texts = [message.content for message in messages[:first]]
    if instructions:
        texts.insert(0, instructions)
    if not texts:
        return tuple(messages)
    return (Message("system", _BETWEEN_INSTRUCTIONS.join(texts)), *messages[first:])


def _with_names(messages: list[Message]) -> list[Message]:
    """With the tools' names where results came without their calls, which were made earlier."""
    if not any(message.role == "tool" and not message.name for message in messages):
        return messages
    called = {call.id: call.name for message in messages for call in message.calls}
    return [
        structs.replace(message, name=called.get(message.call_id, ""))
        if message.role == "tool"
        else message
        for message in messages
    ]


def resolved(
    turns: Iterable[Turn], answer_of: Callable[[str], Message | None]
) -> tuple[Message, ...]:
    """With what is meant by each reference: the whole turn that its item belongs to, once.

    ``answer_of`` knows the answer of a task. Raises ``InvalidRequest`` for one that is not kept.
    """
    messages: list[Message] = []
    seen = set()
    for turn in turns:
        if isinstance(turn, Message):
            messages.append(turn)
        elif turn.task_id not in seen:
            seen.add(turn.task_id)
            answer = answer_of(turn.task_id)
            if answer is None:
                raise InvalidRequest(
                    f"input: item {excerpt(turn.item_id, 64)!r} is not kept here; send it itself",
                    field="input",
                )
            messages.append(answer)
    return tuple(messages)


def _message(item: InputItem, where: str) -> Message:
    if item.role is None:
        raise InvalidRequest(f"{where}.role: is required", field=f"{where}.role")
    if item.content is None:
        field = f"{where}.content"
        raise InvalidRequest(f"{field} is required: a string, or a list of text parts", field=field)
    role = "system" if item.role == "developer" else item.role
    return Message(role, _text_of(item.content))


def _text_of(content: str | tuple[Part, ...]) -> str:
    if isinstance(content, str):
        return content
    return "".join([part.refusal if isinstance(part, Refusal) else part.text for part in content])
