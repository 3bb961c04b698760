"""The items that a conversation is made of, as the Responses API has them.

What a client sends back of an earlier answer has whatever its SDK keeps beside the text; only what
is read here matters.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message
from worker.protocol import excerpt

_BETWEEN_INSTRUCTIONS = "\n\n"
_SERVED = "message, reasoning"


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


Part = InputText | OutputText | Refusal | ReasoningText


class InputItem(msgspec.Struct, frozen=True, gc=False):
    """One item of any type. A body may have so many that the collector would be the dearest part.

    A message may come without its ``type``.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | tuple[Part, ...] | None = None


def turns_of(items: str | Sequence[InputItem]) -> tuple[Message, ...]:
    """A conversation's turns. Raises ``InvalidRequest`` for what is not served."""
    if isinstance(items, str):
        return (Message("user", items),)
    turns = []
    for at, item in enumerate(items):
        if item.type == "reasoning":
            continue  # left out, as templates do with earlier turns
        if item.type != "message":
            where = f"input[{at}].type"
            raise InvalidRequest(
                f"{where}: {excerpt(item.type)} is not served here; expected one of: {_SERVED}",
                field=where,
            )
        turns.append(_message(item, f"input[{at}]"))
    return tuple(turns)


def conversation(
    instructions: str | None, earlier: Iterable[Message], turns: Iterable[Message]
) -> tuple[Message, ...]:
    """All that the model is to read. Instructions that follow each other at the beginning become
    one message, which is all that many chat templates take.
    """
    messages = [*earlier, *turns]
    first = next((at for at, m in enumerate(messages) if m.role != "system"), len(messages))
    texts = [message.content for message in messages[:first]]
    if instructions:
        texts.insert(0, instructions)
    if not texts:
        return tuple(messages)
    return (Message("system", _BETWEEN_INSTRUCTIONS.join(texts)), *messages[first:])


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
