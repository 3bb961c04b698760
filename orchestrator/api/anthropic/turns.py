"""A conversation in Anthropic's form: turns of blocks, including tool calls and their results."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.images import image_of_base64, image_of_url, refuse_file
from orchestrator.api.http.tools import read_call
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import Image, Part
from orchestrator.tasks.job import Message, ToolCall, said_by

_BETWEEN_TURNS = "\n\n"


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type", gc=False):
    """Text of a turn. Prefixes are cached whether or not ``cache_control`` asks for it."""

    text: str
    cache_control: Unused = NULL
    citations: Unused = NULL


Content = str | tuple[TextBlock, ...]


class ImageSource(msgspec.Struct, frozen=True, gc=False):
    """Where an image is: in ``data``, as base64. Its ``media_type`` is seen from the file."""

    type: str = "base64"
    data: str | None = None
    media_type: Unused = NULL
    url: str | None = None
    file_id: Unused = NULL


class ImageBlock(msgspec.Struct, frozen=True, tag="image", tag_field="type", gc=False):
    """An image that the user shows."""

    source: ImageSource | None = None
    cache_control: Unused = NULL


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type", gc=False):
    """Thinking of the model in an earlier turn."""

    thinking: str = ""
    signature: Unused = NULL
    cache_control: Unused = NULL


class RedactedThinkingBlock(
    msgspec.Struct, frozen=True, tag="redacted_thinking", tag_field="type", gc=False
):
    """Thinking that is encrypted; nothing here can use it."""

    data: Unused = NULL
    cache_control: Unused = NULL


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type", gc=False):
    """A tool call that the model made in an earlier turn."""

    id: str = ""
    name: str = ""
    input: msgspec.Raw = NULL
    cache_control: Unused = NULL
    caller: Unused = NULL


class ToolResultBlock(msgspec.Struct, frozen=True, tag="tool_result", tag_field="type", gc=False):
    """The result of a call. Templates cannot mark a call as failed: its content must say so."""

    tool_use_id: str = ""
    content: str | tuple[TextBlock | ImageBlock, ...] | None = ""
    is_error: bool | None = None
    cache_control: Unused = NULL


Block = (
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn. A body may have so many that garbage collection would dominate."""

    role: Literal["user", "assistant", "system"]
    content: str | tuple[Block, ...]


def turns_of(system: Content | None, messages: Sequence[InputMessage]) -> tuple[Message, ...]:
    """A chat of alternating turns; a last turn by the assistant is continued. Raises
    ``InvalidRequest``.

    Blocks of one turn are joined as they are, consecutive turns of one role with an empty line
    between them. Results of tools become turns of their own, before the user's text.
    """
    if not messages:
        raise InvalidRequest("messages is empty; it needs at least one", field="messages")
    names: dict[str, str] = {}
    turns: list[Message] = []
    for role, group in groupby(enumerate(messages), key=lambda numbered: numbered[1].role):
        if role == "assistant":
            turns.append(_said(group, names))
        else:
            turns += _asked(role, group, names)
    last = turns[-1]
    if last.role == "assistant":
        if last.calls:
            raise InvalidRequest(
                "messages: the last one calls tools; a tool_result for each is to follow",
                field="messages",
            )
        if last.content != last.content.rstrip():
            raise InvalidRequest(
                "messages: the last one is the assistant's, which the model continues: it must not"
                " end with whitespace",
                field="messages",
            )
        turns[-1] = msgspec.structs.replace(last, is_open=True)
    instructions = _text_of(system)
    return (Message("system", instructions), *turns) if instructions else tuple(turns)


def _said(group: Iterable[tuple[int, InputMessage]], names: dict[str, str]) -> Message:
    """The model's turn. Its thinking is left out, unless it called tools in that turn."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for at, message in group:
        if isinstance(message.content, str):
            texts.append(message.content)
            continue
        text = ""
        for n, block in enumerate(message.content):
            where = f"messages[{at}].content[{n}]"
            match block:
                case TextBlock():
                    text += block.text
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case RedactedThinkingBlock():
                    pass
                case ToolUseBlock():
                    if not (block.id and block.name):
                        raise InvalidRequest(f"{where}: a tool_use needs id and name", field=where)
                    names[block.id] = block.name
                    calls.append(read_call(block.id, block.name, block.input, f"{where}.input"))
                case _:
                    kind = block.__struct_config__.tag
                    raise InvalidRequest(f"{where}: {kind} is the user's", field=where)
        texts.append(text)
    content = _BETWEEN_TURNS.join(texts)
    if not calls:
        return Message("assistant", content)
    reasoning = _BETWEEN_TURNS.join(thoughts)
    return Message("assistant", content, calls=tuple(calls), reasoning=reasoning)


def _asked(
    role: str, group: Iterable[tuple[int, InputMessage]], names: dict[str, str]
) -> list[Message]:
    """The user's turn, preceded by the results of calls; or the system's turn."""
    turns: list[list[Part]] = []
    results: list[Message] = []
    for at, message in group:
        if isinstance(message.content, str):
            turns.append([message.content])
            continue
        parts: list[Part] = []
        for n, block in enumerate(message.content):
            where = f"messages[{at}].content[{n}]"
            if isinstance(block, TextBlock):
                parts.append(block.text)
            elif isinstance(block, ImageBlock):
                if role != "user":
                    raise InvalidRequest(f"{where}: image is the user's", field=where)
                parts.append(_image_of(block.source, f"{where}.source"))
            elif not isinstance(block, ToolResultBlock):
                kind = block.__struct_config__.tag
                raise InvalidRequest(f"{where}: {kind} is the assistant's", field=where)
            elif not block.tool_use_id:
                raise InvalidRequest(f"{where}: a tool_result needs tool_use_id", field=where)
            else:
                call_id = block.tool_use_id
                results.append(
                    Message(
                        "tool",
                        _result_of(block.content, f"{where}.content"),
                        call_id=call_id,
                        name=names.get(call_id, ""),
                    )
                )
        if parts or not message.content:
            turns.append(parts)
    if not turns:
        return results
    joined = turns[0]
    for parts in turns[1:]:
        joined += [_BETWEEN_TURNS, *parts]
    return [*results, said_by(role, joined)]


def _image_of(source: ImageSource | None, where: str) -> Image:
    if source is None:
        raise InvalidRequest(f"{where} is required: an image's data, as base64", field=where)
    if source.type == "url":
        return image_of_url(source.url, f"{where}.url")
    if source.type == "file":
        raise refuse_file(where)
    return image_of_base64(source.data, f"{where}.data")


def _result_of(content: str | Sequence[TextBlock | ImageBlock] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    if len(texts) < len(content):
        raise InvalidRequest(
            f"{where}: images in a tool's result are not served; send them as image blocks next to"
            " the tool_result",
            field=where,
        )
    return "".join(texts)


def _text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([block.text for block in content])
