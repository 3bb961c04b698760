"""OpenAI's request bodies, as far as they are served here; what is not is refused by name.

``deadline_ms``, ``first_token_ms``, ``token_gap_ms``, ``on_deadline``, ``on_disconnect``,
``priority``, ``tenant``, ``session_id`` and ``placement`` are ours; ``min_tokens``, ``ignore_eos``,
``top_k``, ``min_p`` and ``repetition_penalty`` have the names of vLLM's server. The official SDK
sends them with ``extra_body``.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from orchestrator.api.http.fields import NULL, GenerationRequest
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message, Prompt

Unused = msgspec.Raw
"""Accepted and not even decoded, which could take long: it changes nothing about the answer."""
_prompt_decoder: msgspec.json.Decoder[str | tuple[int, ...]] = msgspec.json.Decoder(
    str | tuple[int, ...]
)
_MOST_LOOKED_AT = 256
"""Bytes of a field of which one value is served; that one is short."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Unused = NULL


class TextPart(msgspec.Struct, frozen=True, tag="text", tag_field="type", gc=False):
    """The only kind of content part that is served."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a chat. A body may have so many that the collector would be the dearest part."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]
    name: str | None = None
    refusal: None = None
    tool_calls: list[None] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[None] | None = None


class OpenAiRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of completion have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # served in one way only
    n: int | None = None

    # harmless
    user: Unused = NULL
    metadata: Unused = NULL
    store: Unused = NULL
    service_tier: Unused = NULL
    safety_identifier: Unused = NULL
    prompt_cache_key: Unused = NULL
    prompt_cache_retention: Unused = NULL

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for the first field that asks for what is not served."""
        for field, (fits, expected) in _ONLY.items():
            value = getattr(self, field, None)
            if isinstance(value, msgspec.Raw):
                value = _short(value)
            if value is not None and not fits(value):
                raise InvalidRequest(f"{field} is not supported here: {expected}", field=field)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")


class ChatRequest(OpenAiRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Unused = NULL
    tool_choice: Unused = NULL
    parallel_tool_calls: Unused = NULL
    functions: Unused = NULL
    function_call: Unused = NULL
    response_format: Unused = NULL
    modalities: list[str] | None = None
    audio: Unused = NULL
    prediction: Unused = NULL
    reasoning_effort: Unused = NULL
    verbosity: Unused = NULL
    web_search_options: Unused = NULL

    def token_limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; send one of them",
                field="max_completion_tokens",
            )
        return self.max_completion_tokens

    def field_names(self) -> Mapping[str, str]:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def wanted_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        return None

    def prompt_of(self) -> Prompt:
        if not self.messages:
            raise InvalidRequest("messages is empty; it needs at least one", field="messages")
        return tuple(_message(message) for message in self.messages)


class CompletionRequest(OpenAiRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: Unused
    logprobs: int | None = None

    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompt_of(self) -> Prompt:
        text = bytes(memoryview(self.prompt)).strip()
        # Of a list of prompts only the first is looked at, for there must be no other: a million
        # lists of one id would hold the interpreter for a second.
        inner = text[1:-1].strip() if text.startswith(b"[") else b""
        try:
            return _prompt_decoder.decode(inner if inner.startswith((b'"', b"[")) else text)
        except msgspec.DecodeError:
            raise InvalidRequest(
                "one prompt per request is served: a string, a list with one string, or token ids",
                field="prompt",
            ) from None


def _short(value: msgspec.Raw) -> object:
    """What JSON stands for; just something, where it is long."""
    return msgspec.json.decode(value) if len(memoryview(value)) <= _MOST_LOOKED_AT else ...


def _message(message: ChatMessage) -> Message:
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    return Message("system" if message.role == "developer" else message.role, content)


def _nothing(value: object) -> bool:
    return not value


_NO_TOOLS = (_nothing, "tool calls are not served")
_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda value: value == 1, "one choice per request is served, n must be 1"),
    "best_of": (lambda value: value == 1, "it must be 1"),
    "echo": (_nothing, "it must be false"),
    "suffix": (_nothing, "it must be empty"),
    "tools": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "tool_choice": (lambda value: value in ("none", "auto"), "tool calls are not served"),
    "function_call": (lambda value: value in ("none", "auto"), "tool calls are not served"),
    "response_format": (lambda value: value == {"type": "text"}, "only text is served"),
    "modalities": (lambda value: value == ["text"], "only text is served"),
    "audio": (_nothing, "only text is served"),
    "prediction": (_nothing, "predicted outputs are not served"),
    "web_search_options": (lambda value: False, "web search is not served"),
}
"""Fields of which one value is served: the test for it, and what to say otherwise."""
