"""The body of ``/v1/responses`` with its tools, as far as served here; the rest is refused by name.

Additional fields are those of every other dialect (``GenerationRequest``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import (
    NULL,
    OtherFormsRequest,
    ServedValues,
    StatedGrammar,
    Unused,
    nothing,
    one_limit,
    other_forms,
    refuse_unserved,
)
from orchestrator.api.http.grammars import json_schema
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.tools import read_tool, require_bounds
from orchestrator.api.openai.responses.items import InputItem, Turns
from orchestrator.api.openai.tools import allowed_of, use_of
from orchestrator.api.openai.types import tier_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from orchestrator.tasks.job import Job, Priority, TemplateArgument
from protocol import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, excerpt


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool. Only functions of the client are served; of others only the type is read."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    output_schema: Unused = NULL


class ForcedTools(msgspec.Struct, frozen=True):
    """The one function that must be called, or those that may or must be."""

    type: str
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: tuple[FunctionTool, ...] = ()


_tools_reader: Reader[list[FunctionTool] | None] = Reader(list[FunctionTool] | None)
_choice_reader: Reader[str | ForcedTools | None] = Reader(str | ForcedTools | None)


def tool_use_of(
    tools: msgspec.Raw, tool_choice: msgspec.Raw, *, is_parallel: bool
) -> ToolUse | None:
    """The tools that may be called; None if there are none. Raises ``InvalidRequest``."""
    require_bounds(tools)
    require_bounds(tool_choice, "tool_choice")
    stated: list[FunctionTool] | None = decode_part(tools, _tools_reader, "tools")
    known = tuple(
        read_tool(tool.name, tool.description, tool.parameters, tool.strict, f"tools[{at}]")
        for at, tool in enumerate(stated or ())
        if _is_served(tool.type, f"tools[{at}].type")
    )
    choice: str | ForcedTools | None = decode_part(tool_choice, _choice_reader, "tool_choice")
    if not isinstance(choice, ForcedTools):
        return use_of(known, choice, "", is_parallel=is_parallel)
    if choice.type != "allowed_tools":
        if choice.type != "function":
            raise _unserved(choice.type, "tool_choice.type")
        return use_of(known, None, choice.name, is_parallel=is_parallel)
    allowed = {
        tool.name for tool in choice.tools if _is_served(tool.type, "tool_choice.tools[].type")
    }
    some = allowed_of(known, allowed, "tool_choice.tools")
    return use_of(some, choice.mode, "", is_parallel=is_parallel)


def _is_served(kind: str, field: str) -> bool:
    """Whether a tool can be called: only the client's functions can. The model is not told of
    others, so that it answers without them."""
    if kind == "function":
        return True
    pass_over("tools[]", f"type={excerpt(kind, 64)}", _unserved(kind, field))
    return False


def _unserved(kind: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {excerpt(kind, 64)} is not served here, only function", field=field
    )


_MAX_METADATA_BYTES = 64 * 1024
"""Bound on ``metadata``; as many pairs as are allowed take less."""
_MAX_TEXT_BYTES = MAX_GRAMMAR_BYTES + 4096
"""Bound on ``text``: a grammar with what surrounds its schema."""
_MAX_PAIRS = 16
_MAX_KEY_CHARS = 64
_MAX_VALUE_CHARS = 512
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)
_LOGPROBS = "message.output_text.logprobs"


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_obfuscation: Unused = NULL


class TextFormat(msgspec.Struct, frozen=True):
    """Format of the text. A schema's own text goes to the worker as it came."""

    type: str = "text"
    name: Unused = NULL
    description: Unused = NULL
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for the text of the answer."""

    format: TextFormat | None = None
    verbosity: Unused = NULL


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

    # served in one way only
    background: Unused = NULL
    conversation: Unused = NULL
    truncation: Unused = NULL
    prompt: Unused = NULL
    moderation: Unused = NULL
    context_management: Unused = NULL

    # harmless
    max_tool_calls: Unused = NULL
    reasoning: Unused = NULL
    user: Unused = NULL
    service_tier: str | None = None
    safety_identifier: Unused = NULL
    prompt_cache_key: Unused = NULL
    prompt_cache_options: Unused = NULL
    prompt_cache_retention: Unused = NULL
    access_programs: Unused = NULL

    def token_limit(self) -> int | None:
        return one_limit("max_output_tokens", self.max_output_tokens, self.max_tokens)

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    def wants_one_piece(self) -> bool:
        return not self.stream

    def stated_tier(self) -> str | None:
        return self.service_tier

    def field_names(self) -> Mapping[str, str]:
        names = {"prompt": "input", "logprobs": "top_logprobs"}
        if self.max_output_tokens is not None:
            names["max_tokens"] = "max_output_tokens"
        return names

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for the first field that asks for what is not served."""
        refuse_unserved(self, _ONLY)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")

    def stated_grammar(self) -> StatedGrammar | None:
        if len(memoryview(self.text)) > _MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"text must have at most {_MAX_TEXT_BYTES} bytes", field="text.format"
            )
        options: TextOptions | None = decode_part(self.text, _text_reader, "text")
        stated = options.format if options is not None else None
        if stated is None or stated.type == "text":
            return None
        field = "text.format"
        if stated.type == "json_object":
            return StatedGrammar(field, Grammar(GrammarKind.JSON_OBJECT))
        if stated.type != "json_schema":
            raise InvalidRequest(
                f"{field}: type {stated.type[:32]!r} is not supported; expected text, json_object "
                "or json_schema",
                field=field,
            )
        if stated.schema == NULL:
            raise InvalidRequest(f"{field}: json_schema needs schema", field=field)
        return StatedGrammar(field, json_schema(field, stated.schema, stated.strict))


@dataclass(frozen=True, slots=True)
class ParsedResponses:
    job: Job
    created_unix: int
    instructions: str | None
    turns: Turns
    tools: ToolUse | None
    template_arguments: Mapping[str, TemplateArgument]
    previous_id: str | None
    is_streamed: bool
    is_stored: bool
    echo: Mapping[str, object]
    """The fields of the request that the answer repeats."""


def echo_of(body: ResponsesRequest, priority: Priority) -> dict[str, object]:
    """The fields that the answer repeats; none of them keeps the whole body in memory."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.token_limit(),
        "max_tool_calls": None,
        "metadata": read_metadata(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": tier_of(priority),
        "store": body.store is not False,
        "text": {"format": {"type": "text"}} if body.text == NULL else body.text.copy(),
        "tool_choice": "auto" if body.tool_choice == NULL else body.tool_choice.copy(),
        "tools": [] if body.tools == NULL else body.tools.copy(),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }


def read_metadata(stated: msgspec.Raw) -> dict[str, str]:
    """The pairs that a client wants kept. Raises ``InvalidRequest``."""
    unfit = InvalidRequest(
        f"metadata must be an object of at most {_MAX_PAIRS} strings of up to "
        f"{_MAX_VALUE_CHARS} characters, under names of up to {_MAX_KEY_CHARS}",
        field="metadata",
    )
    if len(memoryview(stated)) > _MAX_METADATA_BYTES:
        raise unfit
    try:
        pairs = _metadata_decoder.decode(stated) or {}
    except msgspec.DecodeError:
        raise unfit from None
    if len(pairs) > _MAX_PAIRS or any(
        len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS for key, value in pairs.items()
    ):
        raise unfit
    return pairs


_ONLY = {
    **other_forms("text.format"),
    "background": ServedValues(
        lambda value: value is False,
        "responses are not made in the background; POST /v2/tasks answers at once, and with "
        "durable: true its work outlives the process",
    ),
    "conversation": ServedValues(
        nothing,
        "conversations are not kept by name; go on with previous_response_id, or send all of it "
        "as input",
    ),
    "truncation": ServedValues(
        lambda value: value in ("disabled", "auto"),  # agents send "auto" with what fits as well
        "nothing is left out of a conversation: with auto, too, one that does not fit is refused",
    ),
    "prompt": ServedValues(nothing, "stored prompts are not served; send instructions and input"),
    "moderation": ServedValues(nothing, "no moderation is served"),
    "context_management": ServedValues(nothing, "nothing is compacted here", is_hint=True),
}
"""Fields of which only some values are served."""
