"""The supported part of the body of ``/v1/responses``. Other fields are refused by name.

The additional fields are the same in every dialect (``GenerationRequest``).
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.fields import (
    NULL,
    OtherFormsRequest,
    ServedValues,
    StatedGrammar,
    Unused,
    one_limit,
    other_forms,
    refuse_unserved,
)
from orchestrator.api.http.grammars import stated_schema
from orchestrator.api.openai.responses.items import InputItem, Turns
from orchestrator.api.openai.responses.tools import AskedTools
from orchestrator.api.openai.types import tier_of
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Job, Priority, TemplateArgument
from protocol import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

_MAX_METADATA_BYTES = 64 * 1024
"""Most bytes of ``metadata``. The most pairs that OpenAI allows take less."""
_MAX_TEXT_BYTES = MAX_GRAMMAR_BYTES + 4096
"""Most bytes of ``text``: a grammar and the JSON around its schema."""
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_obfuscation: Unused = NULL


class TextFormat(msgspec.Struct, frozen=True):
    """Format of the text. The worker gets a schema's text unchanged."""

    type: str = "text"
    name: Unused = NULL
    description: Unused = NULL
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for the text of the answer."""

    format: TextFormat | None = None
    verbosity: Unused = NULL


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for the model's thinking."""

    effort: str | None = None
    summary: Unused = NULL
    generate_summary: Unused = NULL


_text_reader: Reader[TextOptions | None] = Reader(TextOptions | None)


class ResponsesRequest(OtherFormsRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL

    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: msgspec.Raw = NULL

    # only one value is supported
    background: Unused = NULL
    conversation: Unused = NULL
    truncation: Unused = NULL
    prompt: Unused = NULL
    moderation: Unused = NULL
    context_management: Unused = NULL

    # accepted without effect
    max_tool_calls: Unused = NULL
    reasoning: ReasoningOptions | None = None
    user: Unused = NULL
    service_tier: str | None = None
    safety_identifier: Unused = NULL
    prompt_cache_key: Unused = NULL
    prompt_cache_options: Unused = NULL
    prompt_cache_retention: Unused = NULL
    access_programs: Unused = NULL

    def token_limit(self) -> int | None:
        return one_limit("max_output_tokens", self.max_output_tokens, self.max_tokens)

    def stated_tier(self) -> str | None:
        return self.service_tier

    def field_names(self) -> Mapping[str, str]:
        names = {"prompt": "input"}
        if self.max_output_tokens is not None:
            names["max_tokens"] = "max_output_tokens"
        return names

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for the first unsupported field."""
        refuse_unserved(self, _ONLY)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")

    def stated_grammar(self) -> StatedGrammar | None:
        field = "text.format"
        if len(memoryview(self.text)) > _MAX_TEXT_BYTES:
            raise InvalidRequest(f"text must have at most {_MAX_TEXT_BYTES} bytes", field=field)
        options: TextOptions | None = decode_part(self.text, _text_reader, "text")
        stated = options.format if options is not None else None
        if stated is None or stated.type == "text":
            return None
        if stated.type == "json_object":
            return StatedGrammar(field, Grammar(GrammarKind.JSON_OBJECT))
        expected = "text, json_object or json_schema"
        return stated_schema(field, stated.type, stated.schema, stated.strict, expected)


@dataclass(frozen=True, slots=True)
class ParsedResponses:
    job: Job
    created_unix: int
    instructions: str | None
    turns: Turns
    tools: AskedTools
    template_arguments: Mapping[str, TemplateArgument]
    previous_id: str | None
    is_streamed: bool
    is_stored: bool
    echo: Mapping[str, object]
    """The fields of the request that the response repeats."""


def echo_of(body: ResponsesRequest, priority: Priority, effort: object) -> dict[str, object]:
    """The fields that the response repeats. They do not keep the whole body in memory."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.token_limit(),
        "max_tool_calls": None,
        "metadata": read_metadata(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": tier_of(priority),
        "store": body.store is not False,
        "text": {"format": {"type": "text"}} if body.text == NULL else body.text.copy(),
        "tool_choice": "auto" if body.tool_choice == NULL else body.tool_choice.copy(),
        "tools": [] if body.tools == NULL else body.tools.copy(),
        "top_logprobs": 0,
        "truncation": "disabled",
    }


def read_metadata(stated: msgspec.Raw) -> dict[str, str]:
    """The client's key-value pairs to keep. Raises ``InvalidRequest``."""
    with suppress(msgspec.DecodeError):
        if len(memoryview(stated)) <= _MAX_METADATA_BYTES:
            return _metadata_decoder.decode(stated) or {}
    raise must("metadata", f"be an object of strings, of at most {_MAX_METADATA_BYTES} bytes")


_LOGPROBS_ELSEWHERE = "for log-probabilities use /v1/chat/completions"
_ONLY = {
    **other_forms("text.format"),
    "top_logprobs": ServedValues(_LOGPROBS_ELSEWHERE),
    "include": ServedValues(
        _LOGPROBS_ELSEWHERE, lambda names: "message.output_text.logprobs" not in names
    ),
    "background": ServedValues(
        "for background work use POST /v2/tasks: it answers at once, and with durable: true its "
        "tasks survive the process",
        lambda value: value is False,
    ),
    "conversation": ServedValues(
        "conversations are not kept by name; continue with previous_response_id, or send all of it "
        "as input",
    ),
    "truncation": ServedValues(
        "conversations are never truncated: even with auto, one that does not fit is refused",
        lambda value: value in ("disabled", "auto"),  # agents always send "auto"
    ),
    "prompt": ServedValues("instead of a stored prompt send instructions and input"),
    "moderation": ServedValues("there is no moderation; leave it out"),
    "context_management": ServedValues("conversations are not compacted", is_hint=True),
}
"""Fields for which only some values are supported."""
