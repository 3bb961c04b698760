"""A chat as OpenAI's bodies have it, and what vLLM's add for its template."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from orchestrator.api.http.fields import NULL
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Chat, Message, TemplateArgument

_MOST_ARGUMENT_BYTES = 4096
_arguments_decoder = msgspec.json.Decoder(dict[str, bool | int | float | str | None] | None)
_WORD = re.compile(r"[A-Za-z0-9 _.,:+-]{0,64}")
"""What a template may be told: no special token is spelled so."""


class TextPart(msgspec.Struct, frozen=True, tag="text", tag_field="type", gc=False):
    """The only kind of content part that is served."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a chat. A body may have so many that the collector would be the dearest part."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: list[None] | None = None
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


def chat_of(body: StatesChat) -> Chat:
    """Raises ``InvalidRequest`` for one that is not served."""
    if not body.messages:
        raise InvalidRequest("messages is empty; it needs at least one", field="messages")
    messages = [_message(message, at) for at, message in enumerate(body.messages)]
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                field="continue_final_message",
            )
        last = messages[-1]
        messages[-1] = Message(last.role, last.content, is_open=True)
    return Chat(
        tuple(messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_arguments=_arguments(body.chat_template_kwargs),
    )


def _message(message: ChatMessage, at: int) -> Message:
    """What a model was thinking is left out, as templates do with earlier turns."""
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
    return Message("system" if message.role == "developer" else message.role, content)


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
