"""A chat as OpenAI's bodies have it, and what vLLM's add for its template."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from orchestrator.api.http.fields import NULL
from orchestrator.api.http.tools import read_call
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Chat, Message, TemplateArgument
from orchestrator.tasks.tools import Tool

_MOST_ARGUMENT_BYTES = 4096
_arguments_decoder = msgspec.json.Decoder(dict[str, bool | int | float | str | None] | None)
_WORD = re.compile(r"[A-Za-z0-9 _.,:+-]{0,64}")
"""What a template may be told: no special token is spelled so."""


class TextPart(msgspec.Struct, frozen=True, tag="text", tag_field="type", gc=False):
    """The only kind of content part that is served."""

    text: str


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    name: str
    arguments: str = ""
    """A JSON object."""


class MessageToolCall(msgspec.Struct, frozen=True, gc=False):
    """What the model called in an earlier turn, as it was sent to the client."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a chat. A body may have so many that the collector would be the dearest part."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: tuple[MessageToolCall, ...] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[None] | None = None


class StatesChat(Protocol):
    """The fields of a body that are read here."""

    @property
    def messages(self) -> Sequence[ChatMessage]: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> msgspec.Raw: ...


def chat_of(body: StatesChat, tools: tuple[Tool, ...] = ()) -> Chat:
    """Raises ``InvalidRequest`` for one that is not served."""
    if not body.messages:
        raise InvalidRequest("messages is empty; it needs at least one", field="messages")
    called: dict[str, str] = {}
    messages = [_message(message, at, called) for at, message in enumerate(body.messages)]
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                field="continue_final_message",
            )
        last = messages[-1]
        messages[-1] = msgspec.structs.replace(last, is_open=True)
    return Chat(
        tuple(messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_arguments=_arguments(body.chat_template_kwargs),
        tools=tools,
    )


def _message(message: ChatMessage, at: int, called: dict[str, str]) -> Message:
    """What a model was thinking is left out, as templates do with earlier turns, unless it called
    tools then: it goes on from there. ``called`` are the names of calls so far, by id."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            where = f"messages[{at}].content"
            raise InvalidRequest(
                f"{where} is required: a string, or a list of text parts", field=where
            )
        content = ""
    elif not isinstance(content, str):
        content = "".join(part.text for part in content)
    if message.role == "tool":
        call_id = message.tool_call_id
        if not call_id:
            where = f"messages[{at}].tool_call_id"
            raise InvalidRequest(f"{where} is required: which call this came of", field=where)
        return Message(
            "tool", content, call_id=call_id, name=message.name or called.get(call_id, "")
        )
    if not message.tool_calls:
        return Message("system" if message.role == "developer" else message.role, content)
    if message.role != "assistant":
        where = f"messages[{at}].tool_calls"
        raise InvalidRequest(f"{where}: only an assistant's message has tool calls", field=where)
    for call in message.tool_calls:
        called[call.id] = call.function.name
    return Message(
        "assistant",
        content,
        calls=tuple(
            read_call(
                call.id,
                call.function.name,
                call.function.arguments,
                f"messages[{at}].tool_calls[{n}].function.arguments",
            )
            for n, call in enumerate(message.tool_calls)
        ),
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _arguments(stated: msgspec.Raw) -> Mapping[str, TemplateArgument]:
    if stated is NULL:
        return {}
    field = "chat_template_kwargs"
    if len(memoryview(stated)) > _MOST_ARGUMENT_BYTES:
        raise InvalidRequest(f"{field} must have at most {_MOST_ARGUMENT_BYTES} bytes", field=field)
    unfit = InvalidRequest(
        f"{field} must be an object of true, false, numbers or words of up to 64 characters, "
        'such as {"enable_thinking": false}',
        field=field,
    )
    try:
        arguments = _arguments_decoder.decode(stated) or {}
    except msgspec.DecodeError:
        raise unfit from None
    if any(isinstance(value, str) and not _WORD.fullmatch(value) for value in arguments.values()):
        raise unfit
    return arguments
