"""A conversation in Anthropic's format: turns of blocks, including tool calls and their results."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Literal

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.field_errors import missing, wrong
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.images import image_of_base64, image_of_url, refuse_file, shown_by_users
from orchestrator.api.http.tools import read_call
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import Image, Part, text_in
from orchestrator.tasks.job import Message, ToolCall, said_by
from protocol import excerpt

_BETWEEN_TURNS = "\n\n"
_OF_USERS: Final = ("text", "image", "tool_result")
_OF_MODELS: Final = ("text", "thinking", "redacted_thinking", "tool_use")
_WITHOUT_CONTENT: Final = (
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_use",
    "server_tool_use",
    "tool_reference",
)
"""Blocks about tools that another service's server ran. All results except ``tool_result`` are such
blocks too: the text after them states the result. A reference names a tool that the model sees."""


class ImageSource(msgspec.Struct, frozen=True, gc=False):
    """The source of an image: ``data`` in base64. The ``media_type`` is read from the file."""

    type: str = "base64"
    data: str | None = None
    media_type: Unused = NULL
    url: str | None = None
    file_id: Unused = NULL


class Block(msgspec.Struct, frozen=True, gc=False):
    """A block of any type: text, image, thinking, tool call, tool result. Prefixes are cached with
    and without ``cache_control``. Templates cannot mark a tool call as failed: its content must
    say so."""

    type: str
    text: str = ""
    source: ImageSource | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = NULL
    tool_use_id: str = ""
    content: msgspec.Raw = NULL
    """The result of a tool. Not read in blocks of other types."""
    cache_control: Unused = NULL
    caller: Unused = NULL
    citations: Unused = NULL
    data: Unused = NULL
    is_error: Unused = NULL
    signature: Unused = NULL
    tool_name: Unused = NULL


Content = str | tuple[Block, ...]
_content_reader: Reader[Content | None] = Reader(Content | None)


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn. A body may have so many turns that garbage collection would dominate."""

    role: Literal["user", "assistant", "system"]
    content: Content


def turns_of(system: Content | None, messages: Sequence[InputMessage]) -> tuple[Message, ...]:
    """A chat of alternating turns. The model continues a last turn of the assistant. Raises
    ``InvalidRequest``.

    Blocks of one turn are joined unchanged. Consecutive turns of one role are joined with an empty
    line between them. Tool results become separate turns before the user's text.
    """
    names: dict[str, str] = {}
    turns: list[Message] = []
    for role, group in groupby(enumerate(messages), key=lambda numbered: numbered[1].role):
        if role == "assistant":
            turns.append(_said(group, names))
        else:
            turns += _asked(role, group, names)
    if not turns:
        raise InvalidRequest("messages is empty; send at least one message", field="messages")
    last = turns[-1]
    if last.role == "assistant":
        if last.calls:
            raise wrong(
                "messages", "the last one calls tools; send a tool_result for each call after it"
            )
        if last.content != last.content.rstrip():
            raise wrong(
                "messages",
                "the last one is the assistant's, and the model continues it: remove the "
                "whitespace at its end",
            )
        turns[-1] = msgspec.structs.replace(last, is_open=True)
    instructions = text_in(list(_parts_of(system, "system", "text")))
    shown = shown_by_users(turns)
    return (Message("system", instructions), *shown) if instructions else shown


def _said(group: Iterable[tuple[int, InputMessage]], names: dict[str, str]) -> Message:
    """The model's turn, without its thinking unless it called tools in that turn."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for at, message in group:
        text = ""
        for n, block in enumerate(_blocks(message.content)):
            where = f"messages[{at}].content[{n}]"
            match block.type:
                case "text":
                    text += block.text
                case "thinking":
                    thoughts.append(block.thinking)
                case "redacted_thinking":
                    pass
                case "tool_use":
                    if not (block.id and block.name):
                        raise wrong(where, "a tool_use needs id and name")
                    names[block.id] = block.name
                    calls.append(read_call(block.id, block.name, block.input, f"{where}.input"))
                case _:
                    _pass_over(block.type, where, _OF_MODELS)
        texts.append(text)
    content = _BETWEEN_TURNS.join(texts)
    if not calls:
        return Message("assistant", content)
    reasoning = _BETWEEN_TURNS.join(thoughts)
    return Message("assistant", content, calls=tuple(calls), reasoning=reasoning)


def _asked(
    role: str, group: Iterable[tuple[int, InputMessage]], names: dict[str, str]
) -> list[Message]:
    """The user's turn, after the results of tool calls; or the system's turn."""
    turns: list[list[Part]] = []
    results: list[Message] = []
    for at, message in group:
        parts: list[Part] = []
        for n, block in enumerate(_blocks(message.content)):
            where = f"messages[{at}].content[{n}]"
            if block.type != "tool_result":
                parts += _shown(block, where, _OF_USERS if role == "user" else ("text",))
                continue
            call_id = block.tool_use_id
            if not call_id:
                raise wrong(where, "a tool_result needs tool_use_id")
            where, place = f"{where}.content", "messages[].content[].content"
            content = decode_part(block.content, _content_reader, where, place)
            result = said_by("tool", list(_parts_of(content, where, "text", "image")))
            name = names.get(call_id, "")
            results.append(msgspec.structs.replace(result, call_id=call_id, name=name))
        if parts or not message.content:
            turns.append(parts)
    if not turns:
        return results
    joined = [part for parts in turns for part in (_BETWEEN_TURNS, *parts)]
    return [*results, said_by(role, joined[1:])]


def _parts_of(content: Content | None, where: str, *expected: str) -> Iterator[Part]:
    """Text and images of a string or of blocks of ``expected`` types. Raises ``InvalidRequest``."""
    for n, block in enumerate(_blocks(content)):
        yield from _shown(block, f"{where}[{n}]", expected)


def _blocks(content: Content | None) -> tuple[Block, ...]:
    if content is None or isinstance(content, str):
        return (Block("text", content or ""),)
    return content


def _shown(block: Block, where: str, expected: Sequence[str]) -> Iterator[Part]:
    """A block's text and images for the model. Raises ``InvalidRequest``."""
    if block.type == "text":
        yield block.text
    elif block.type in expected:
        yield _image_of(block.source, f"{where}.source")
    else:
        _pass_over(block.type, where, expected)


def _image_of(source: ImageSource | None, where: str) -> Image:
    if source is None:
        raise missing(where, "send the image as base64")
    if source.type == "url":
        return image_of_url(source.url, f"{where}.url")
    if source.type == "file":
        raise refuse_file(where)
    return image_of_base64(source.data, f"{where}.data")


def _pass_over(kind: str, where: str, expected: Sequence[str]) -> None:
    """Ignore a block without content for the model. Raises ``InvalidRequest`` for other blocks."""
    if kind in (*_OF_USERS, *_OF_MODELS):
        owner = "user's" if kind in _OF_USERS else "assistant's"
        raise wrong(where, f"{kind} is the {owner}")
    kind, types = excerpt(kind, 64), ", ".join(expected)
    refusal = wrong(f"{where}.type", f"{kind} is not supported; expected one of: {types}")
    if kind not in _WITHOUT_CONTENT and not kind.endswith("_tool_result"):
        raise refusal
    pass_over("messages[].content[]", f"type={kind}", refusal)
