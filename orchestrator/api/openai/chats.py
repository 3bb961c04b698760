"""A chat in OpenAI's format, with vLLM's fields for the chat template."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from orchestrator.api.http.field_errors import missing, wrong
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.images import image_of_url, refuse_file, shown_by_users
from orchestrator.api.http.tools import read_call, template_arguments
from orchestrator.api.openai.tools import INPUT
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import Image, Part
from orchestrator.tasks.job import Chat, Message, Tool, ToolCall, said_by
from protocol import excerpt

if TYPE_CHECKING:
    from orchestrator.api.openai.types import ChatRequest

_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image_url", "input_image")
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary_text")


class ImageUrl(msgspec.Struct, frozen=True, gc=False):
    """The ``data:`` URL of an image."""

    url: str | None = None
    detail: Unused = NULL
    """Has no effect: a model sees all images in its own resolution."""


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message. Text and images are accepted under the type names of all SDKs."""

    type: str | None = None
    text: str | None = None
    image_url: str | ImageUrl | None = None
    file_id: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    annotations: Unused = NULL
    detail: Unused = NULL
    logprobs: Unused = NULL
    cache_control: Unused = NULL
    """Has no effect: prefixes are always cached."""


Content = str | tuple[str | ContentPart, ...] | None


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    name: str
    arguments: msgspec.Raw = NULL
    """A JSON object, or a string with a JSON object."""


class CalledText(msgspec.Struct, frozen=True, gc=False):
    """A call of a free-text tool."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, frozen=True, gc=False):
    """A tool call of an earlier turn, in the format in which the client received it."""

    function: CalledFunction | None = None
    custom: CalledText | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: Unused = NULL
    """Index from a streamed delta. Some clients keep and return it."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn. A body may have so many turns that garbage collection would dominate."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[MessageToolCall, ...] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """The single call in OpenAI's older format."""
    audio: None = None
    annotations: Unused = NULL
    cache_control: Unused = NULL


def chat_of(body: "ChatRequest", tools: tuple[Tool, ...]) -> Chat:
    """The chat of a body, with the tools that may be called. Raises ``InvalidRequest``."""
    if not body.messages:
        raise InvalidRequest("messages is empty; send at least one message", field="messages")
    called: dict[str, str] = {}
    messages = [_message(message, at, called) for at, message in enumerate(body.messages)]
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequest(
                "send either continue_final_message or add_generation_prompt, not both",
                field="continue_final_message",
            )
        messages[-1] = msgspec.structs.replace(messages[-1], is_open=True)
    return Chat(
        shown_by_users(messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_arguments=template_arguments(body.chat_template_kwargs),
        tools=tools,
    )


def _message(message: ChatMessage, at: int, called: dict[str, str]) -> Message:
    """A turn for the model. Like chat templates, it omits the thinking of an earlier turn unless
    that turn called tools. ``called`` maps the ids of calls so far to their names."""
    where = f"messages[{at}].content"
    may_be_empty = message.role in ("assistant", "tool", "function")
    content: Content = message.content
    if content is None and may_be_empty:  # other roles: the field had a wrong name, was ignored
        content = message.refusal or ""
    said = said_in(message.role, content, where)
    if message.role in ("tool", "function"):
        return _result(message, said, f"messages[{at}].tool_call_id", called)
    calls = message.tool_calls or ()
    if message.function_call is not None:
        calls = (*calls, MessageToolCall(message.function_call, id=f"call_{at}"))
    if not calls:
        return said
    if message.role != "assistant":
        raise wrong(f"messages[{at}].tool_calls", "only messages of role assistant have them")
    made = tuple(_call(call, f"messages[{at}].tool_calls[{n}]") for n, call in enumerate(calls))
    called |= {call.id: call.name for call in made}
    thoughts = message.reasoning_content or message.reasoning or thoughts_in(message.content)
    return Message("assistant", said.content, calls=made, reasoning=thoughts)


def said_in(role: str, content: Content, where: str) -> Message:
    """The text and images of a turn. Raises ``InvalidRequest``."""
    if content is None:
        raise missing(where, "send a string, or a list of text and image parts")
    role = "system" if role == "developer" else role
    if isinstance(content, str):
        return Message(role, content)
    said = said_by(role, [_part_of(part, f"{where}[{n}]") for n, part in enumerate(content)])
    if said.parts and role not in ("user", "tool", "function"):
        raise wrong(where, "images must be in a user message; send them with role user")
    return said


def thoughts_in(content: Content) -> str:
    """The model's thinking from the parts of its turn."""
    if content is None or isinstance(content, str):
        return ""
    parts = [part for part in content if isinstance(part, ContentPart) and part.type in _THOUGHTS]
    return "".join([part.thinking or part.text or "" for part in parts])


def _call(call: MessageToolCall, where: str) -> ToolCall:
    call_id, text, function = call.id or "", call.custom, call.function
    if text is not None and call.type != "function":
        return ToolCall(call_id, text.name, {INPUT: text.input}, len(text.name) + len(text.input))
    if function is None:
        raise wrong(where, "expected function or custom")
    return read_call(call_id, function.name, function.arguments, f"{where}.function.arguments")


def _image_in(part: ContentPart, where: str) -> Image:
    url = part.image_url
    if url is None and part.file_id is not None:
        raise refuse_file(f"{where}.file_id")
    if isinstance(url, ImageUrl):
        return image_of_url(url.url, f"{where}.image_url.url")
    return image_of_url(url, f"{where}.image_url")


def _result(message: ChatMessage, said: Message, where: str, called: Mapping[str, str]) -> Message:
    """The result of a call. A function's result without an id belongs to the last call."""
    call_id = message.tool_call_id or ""
    if not call_id and message.role == "function":
        call_id = next(reversed(called), "call_0")  # type: ignore[arg-type]
    if not call_id:
        raise missing(where, "send the id of the tool call")
    name = message.name or called.get(call_id, "")
    return Message("tool", said.content, call_id=call_id, name=name, parts=said.parts)


def _part_of(part: str | ContentPart, where: str) -> Part:
    if isinstance(part, str):
        return part
    kind = part.type or "text"
    if kind in _THOUGHTS:
        return ""
    if kind in _IMAGES:
        return _image_in(part, where)
    if kind not in _TEXTS:
        raise wrong(
            f"{where}.type",
            f"only text and images are supported, got {excerpt(kind, 64)!r}; expected one of: "
            f"{', '.join((*_TEXTS, *_IMAGES))}",
        )
    name, text = ("refusal", part.refusal) if kind == "refusal" else ("text", part.text)
    if text is None:
        raise missing(f"{where}.{name}")
    return text
