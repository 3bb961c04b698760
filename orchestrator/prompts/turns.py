"""A chat in the form for templates, and all client texts in it.

Client texts may be anywhere: in a message, a tool's description, or the arguments of an earlier
call.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import msgspec

from orchestrator.tasks.image import Image, Part
from orchestrator.tasks.job import Chat, JsonObject, Message, Prompt, ToolCall, said_by

MESSAGE_CHARS = 256
"""Additional characters per message in the bound on a rendered text."""
_SHORT = 9


class BadTemplate(ValueError):
    """An invalid chat template. The message has the reason."""


class Refused(ValueError):
    """Messages that a chat template cannot render or refuses. The message has the reason."""


class Text(NamedTuple):
    text: str
    is_own: bool
    """Whether the model wrote the text."""


Change = Callable[[Text], str]
OwnId = Callable[[str, str, int], str]
"""Makes the model's call id from the client's, the tool's name and the number of earlier calls."""


def texts_of(chat: Chat) -> list[Text]:
    """All texts of a chat, wherever they are."""
    found: list[Text] = []

    def keep(text: Text) -> str:
        found.append(text)
        return text.text

    rewritten(chat, keep)
    return found


def rewritten(chat: Chat, change: Change) -> Chat:
    """A copy of a chat with each text changed."""
    messages = tuple(_rewritten(message, change) for message in chat.messages)
    tools = tuple(
        msgspec.structs.replace(
            tool,
            name=change(Text(tool.name, False)),
            description=change(Text(tool.description, False)),
            parameters=_changed(tool.parameters, change, False),
        )
        for tool in chat.tools
    )
    return replace(chat, messages=messages, tools=tools)


def images_of(prompt: Prompt) -> list[Image]:
    """All images of a prompt, in the order in which the model reads them."""
    messages = prompt.messages if isinstance(prompt, Chat) else prompt
    if isinstance(messages, str) or not messages or not isinstance(messages[0], Message):
        return []
    return [image for turn in messages if turn.parts for image in turn.images]


def turns_of(
    messages: Sequence[Message], *, in_parts: bool = False, in_text: bool = False
) -> list[dict[str, object]]:
    """Messages in the form for templates, without empty fields. ``in_parts``: each content is a
    list of parts, for templates that show images. ``in_text``: calls' arguments are JSON text."""
    return [_turn(message, in_parts, in_text) for message in messages]


def with_end(message: Message, end: str) -> Message:
    """A copy of a message with more text appended."""
    parts = (*message.parts, end) if message.parts else ()
    return msgspec.structs.replace(message, content=message.content + end, parts=parts)


def with_own_ids(chat: Chat, own_id: OwnId) -> Chat:
    """A copy with the model's ids of calls."""
    if not any(message.calls or message.call_id for message in chat.messages):
        return chat
    ids: dict[str, str] = {}
    messages = []
    for message in chat.messages:
        calls = []
        for call in message.calls:
            ids[call.id] = own_id(call.id, call.name, len(ids))
            calls.append(msgspec.structs.replace(call, id=ids[call.id]))
        told = message.call_id
        told = told and (ids.get(told) or own_id(told, message.name, len(ids)))
        messages.append(msgspec.structs.replace(message, call_id=told, calls=tuple(calls)))
    return replace(chat, messages=tuple(messages))


def _short_id(call_id: str, name: str, at: int) -> str:
    if len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT]


OWN_IDS: Mapping[str, OwnId] = {
    "[TOOL_CALLS]": _short_id,
    "<|tool_call_argument_begin|>": lambda call_id, name, at: f"functions.{name}:{at}",
}
"""Formats of models' call ids, by a marker in their templates: Mistral's accept only nine letters
and digits; Kimi K2 reads the tool's name from the id."""


def without_later_systems(chat: Chat) -> Chat:
    """A copy of a chat in which later system turns become user turns and are joined with adjacent
    turns. For templates that refuse later system turns."""
    messages = chat.messages
    first = next((at for at, m in enumerate(messages) if m.role != "system"), len(messages))
    if all(message.role != "system" for message in messages[first:]):
        return chat
    turns = list(messages[:first])
    for asks, group in groupby(messages[first:], lambda turn: turn.role in ("system", "user")):
        said = list(group)
        if asks:
            joined = said_by("user", list(_between_lines(said)))
            said = [msgspec.structs.replace(joined, is_open=said[-1].is_open)]
        turns += said
    return replace(chat, messages=tuple(turns))


def _between_lines(messages: Sequence[Message]) -> Iterator[Part]:
    for at, message in enumerate(messages):
        if at:
            yield "\n\n"
        yield from message.parts or (message.content,)


def tools_of(chat: Chat) -> list[JsonObject] | None:
    """Tools in the form for templates; None if there are none, as in ``transformers``."""
    return [tool.stated() for tool in chat.tools] or None


def uses_tools(chat: Chat) -> bool:
    """Whether the chat has content that only a template with tools can render."""
    return bool(chat.tools) or any(m.calls or m.role == "tool" for m in chat.messages)


def chars_of(chat: Chat, per_message: int) -> int:
    """Approximate characters of a chat, plus ``per_message`` for each message."""
    chars = sum(per_message + tool.chars for tool in chat.tools)
    for message in chat.messages:
        chars += per_message + len(message.role) + len(message.content)
        if message.calls:
            chars += len(message.reasoning)
            chars += sum(per_message + len(call.id) + call.chars for call in message.calls)
        if message.call_id:
            chars += len(message.call_id) + len(message.name)
    return chars


def _turn(message: Message, in_parts: bool, in_text: bool) -> dict[str, object]:
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    if in_parts:
        turn["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in message.parts or (message.content,)
        ]
    if message.calls:
        turn["tool_calls"] = [call.stated(in_text=in_text) for call in message.calls]
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
            if not message.content:  # gpt-oss's name; its template accepts one of the two
                turn["thinking"] = message.reasoning
    if message.call_id:
        turn["tool_call_id"] = message.call_id
        if message.name:
            turn["name"] = message.name
    return turn


def _rewritten(message: Message, change: Change) -> Message:
    own = message.role == "assistant"
    if message.parts:  # a user's, who calls no tools
        said = said_by(
            message.role,
            [change(Text(part, own)) if isinstance(part, str) else part for part in message.parts],
        )
        return msgspec.structs.replace(said, is_open=message.is_open)
    content = change(Text(message.content, own))
    if not (message.calls or message.call_id):
        return Message(message.role, content, message.is_open)
    return Message(
        message.role,
        content,
        message.is_open,
        calls=tuple(_call(call, change, own) for call in message.calls),
        reasoning=change(Text(message.reasoning, own)),
        call_id=change(Text(message.call_id, own)),
        name=change(Text(message.name, own)),
    )


def _call(call: ToolCall, change: Change, own: bool) -> ToolCall:
    arguments: JsonObject = _changed(call.arguments, change, own)  # type: ignore[assignment]
    return msgspec.structs.replace(
        call, id=change(Text(call.id, own)), name=change(Text(call.name, own)), arguments=arguments
    )


def _changed(value: object, change: Change, own: bool) -> object:
    if isinstance(value, str):
        return change(Text(value, own))
    if isinstance(value, Mapping):
        return {
            change(Text(key, own)): _changed(inner, change, own) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_changed(inner, change, own) for inner in value]
    return value
