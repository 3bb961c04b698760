"""The supported part of OpenAI's request bodies. Other fields are refused by name.

``deadline_ms``, ``first_token_ms``, ``token_gap_ms``, ``on_deadline``, ``on_disconnect``,
``priority``, ``tenant``, ``session_id``, ``idle_keep_s`` and ``placement`` are our own.
``min_tokens``, ``ignore_eos``, ``top_k``, ``min_p``, ``repetition_penalty``, ``structured_outputs``
and ``guided_…`` have vLLM's names. The official SDK sends all of these with ``extra_body``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

from orchestrator.api.http.field_errors import must, wrong
from orchestrator.api.http.fields import (
    FLEX,
    NULL,
    ServedValues,
    Unused,
    one_limit,
    refuse_unserved,
)
from orchestrator.api.http.grammars import GrammarRequest
from orchestrator.api.openai.chats import ChatMessage, chat_of
from orchestrator.api.openai.tools import stated_tools, tool_use_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing.parser import ToolUse
from orchestrator.tasks.job import Job, Priority, Prompt
from protocol import OnDeadline

MAX_CHOICES = 128
"""Most choices of a request for all prompts. Each choice is a task. OpenAI's limit for ``n``."""
_Prompts = msgspec.defstruct(
    "_Prompts",
    [(f"prompt_{at}", msgspec.Raw, NULL) for at in range(MAX_CHOICES)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list that is not read further when it is too long: a million prompts would take a second."""
_prompts_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Prompts)
_PromptBody = str | tuple[int, ...]
_prompt_decoder: msgspec.json.Decoder[_PromptBody] = msgspec.json.Decoder(_PromptBody)


_SERVED = {
    "allowed_token_ids": ServedValues("send structured_outputs or logit_bias"),
    "best_of": ServedValues(
        "send n and logprobs, and select one of the answers", lambda value: value == 1
    ),
    "bad_words": ServedValues("send logit_bias, or search for them in the answer"),
    "detokenize": ServedValues("answers always have text", lambda value: value is True),
    "logits_processors": ServedValues("send structured_outputs or logit_bias"),
    "prompt_logprobs": ServedValues(
        "send a prompt with echo and logprobs to /v1/completions", lambda value: False
    ),
    "return_tokens_as_token_ids": ServedValues("send return_token_ids"),
    "truncate_prompt_tokens": ServedValues(
        "prompts are never truncated; send a prompt that fits the context"
    ),
    "use_beam_search": ServedValues("answers are sampled; send n"),
    **dict.fromkeys(
        ("ebnf", "grammar", "json_schema", "regex"),
        ServedValues("send structured_outputs, or response_format"),
    ),
}
"""Fields for which only some values are supported. Ignoring them would change the answer."""
_SERVED_OF_DYNAMO = dict.fromkeys(
    ("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    ServedValues("send it at the top level, not in nvext"),
)
_SERVED_OF_CHATS = {
    **_SERVED,
    "add_special_tokens": ServedValues("the chat template has its own"),
    "audio": ServedValues("answers are only text"),
    "chat_template": ServedValues(
        "send chat_template_kwargs for the model's template, or a prompt to completions"
    ),
    "documents": ServedValues("send them as text in messages"),
    "echo": ServedValues("send it to /v1/completions"),
    "function_call": ServedValues(
        "send tool_choice, which replaced it", lambda value: value in ("none", "auto")
    ),
    "functions": ServedValues("send tools, which replaced it"),
    "modalities": ServedValues("answers are only text", lambda value: value == ["text"]),
    "prediction": ServedValues("there are no predicted outputs", is_hint=True),
    "web_search_options": ServedValues("there is no web search", lambda value: False, is_hint=True),
}
_SERVED_OF_TEXTS = {
    **_SERVED,
    "add_special_tokens": ServedValues(
        "text prompts always get them; send token ids, which get none", bool
    ),
    "prompt_embeds": ServedValues("send a prompt, or token ids"),
    "suffix": ServedValues("send a prompt with the model's infill markers"),
}


def tier_of(priority: Priority) -> str:
    """The ``service_tier`` of a request: default, or flex for batch work."""
    return FLEX if priority is Priority.BATCH else "default"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Unused = NULL


class AnswerOptions(NamedTuple):
    """Additional parts of an answer."""

    usage: bool = False
    """Whether a stream ends with the usage of all choices."""
    running_usage: bool = False
    """Whether each chunk has the usage of its choice so far."""
    token_ids: bool = False
    stop_in_text: bool = False
    echo: bool = False
    """Whether the prompt precedes the text, with log-probabilities if the text has them."""
    tier: bool = False
    """Whether the answer has its ``service_tier``."""

    @property
    def needs_prompt_ids(self) -> bool:
        return self.token_ids or self.echo


class ParsedCompletion(NamedTuple):
    job: Job
    prompts: tuple[Prompt, ...]
    n: int
    """Choices per prompt."""
    is_streamed: bool
    options: AnswerOptions
    tools: ToolUse | None = None

    @property
    def free_texts(self) -> frozenset[str]:
        return self.tools.free_texts if self.tools else frozenset()


class AgentHints(msgspec.Struct, frozen=True):
    """An agent's hints for Dynamo. Only the priority has an effect here."""

    priority: int | None = None


class DynamosBody(msgspec.Struct, frozen=True):
    """Dynamo's additional fields. Its fields for the answer's format have other names here."""

    agent_hints: AgentHints | None = None
    guided_choice: msgspec.Raw = NULL
    guided_grammar: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL
    guided_regex: msgspec.Raw = NULL


class OpenAiRequest(GrammarRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The common fields of both kinds of completion."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None

    # vLLM's
    echo: bool | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Unused = NULL
    best_of: Unused = NULL
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Unused = NULL
    chat_template_kwargs: Unused = NULL
    add_special_tokens: bool | None = None
    allowed_token_ids: Unused = NULL
    bad_words: Unused = NULL
    detokenize: Unused = NULL
    logits_processors: Unused = NULL
    return_tokens_as_token_ids: Unused = NULL
    truncate_prompt_tokens: Unused = NULL
    use_beam_search: Unused = NULL

    # SGLang's and llama.cpp's
    ebnf: Unused = NULL
    grammar: Unused = NULL
    json_schema: Unused = NULL
    regex: Unused = NULL

    nvext: DynamosBody | None = None

    # accepted without effect
    user: Unused = NULL
    metadata: Unused = NULL
    store: Unused = NULL
    service_tier: str | None = None
    safety_identifier: Unused = NULL
    prompt_cache_key: Unused = NULL
    prompt_cache_retention: Unused = NULL

    served: ClassVar[Mapping[str, ServedValues]] = {}
    """Fields for which only some values are supported."""

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for the first unsupported value."""
        refuse_unserved(self, self.served)
        if self.nvext is not None:
            refuse_unserved(self.nvext, _SERVED_OF_DYNAMO)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")
        if self.wanted_prompt_logprobs() is not None and self.on_deadline is not OnDeadline.ERROR:
            rule = "be error with log-probabilities of the prompt: they cannot be returned in part"
            raise must("on_deadline", rule)

    def own_sampling(self) -> Mapping[str, Any]:
        return {
            "prompt_logprobs": self.wanted_prompt_logprobs(),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "skip_special_tokens": self.skip_special_tokens is not False,
        }

    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives to return per prompt token; None: no log-probabilities."""
        return None

    def hinted_priority(self) -> int | None:
        hints = self.nvext and self.nvext.agent_hints
        return hints.priority if hints else None

    def stated_tier(self) -> str | None:
        return self.service_tier

    def prompts(self, use: ToolUse | None) -> tuple[Prompt, ...]:
        """The prompts. Each has its own choices. The model sees the tools that it may ``use``.
        Raises ``InvalidRequest`` for unsupported prompts."""
        raise NotImplementedError

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None if there are none. Raises ``InvalidRequest``."""
        return None

    def choices_per_prompt(self, prompts: int) -> int:
        """Number of choices per prompt. Raises ``InvalidRequest`` if there are too many in all."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise must("n", f"be 1 to {MAX_CHOICES}, got {n}")
        if n * prompts > MAX_CHOICES:
            raise wrong("n", f"at most {MAX_CHOICES} choices for all prompts together")
        return n

    def answer_options(self) -> AnswerOptions:
        options = self.stream_options or StreamOptions()
        usage = bool(options.include_usage)
        return AnswerOptions(
            usage=usage,
            running_usage=usage and bool(options.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            stop_in_text=bool(self.include_stop_str_in_output),
            echo=bool(self.echo),
            tier=self.service_tier is not None,
        )


class ChatRequest(OpenAiRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    served: ClassVar[Mapping[str, ServedValues]] = _SERVED_OF_CHATS

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Unused = NULL
    documents: Unused = NULL

    tools: Unused = NULL
    tool_choice: Unused = NULL
    parallel_tool_calls: bool | None = None
    functions: Unused = NULL
    function_call: Unused = NULL
    modalities: list[str] | None = None
    audio: Unused = NULL
    prediction: Unused = NULL
    reasoning_effort: str | None = None
    verbosity: Unused = NULL
    web_search_options: Unused = NULL

    def token_limit(self) -> int | None:
        return one_limit("max_completion_tokens", self.max_completion_tokens, self.max_tokens)

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

    def tool_use(self) -> ToolUse | None:
        is_parallel = self.parallel_tool_calls is not False
        return tool_use_of(stated_tools(self.tools), self.tool_choice, is_parallel=is_parallel)

    def prompts(self, use: ToolUse | None) -> tuple[Prompt, ...]:
        return (chat_of(self, use.tools if use else ()),)


class CompletionRequest(OpenAiRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``."""

    served: ClassVar[Mapping[str, ServedValues]] = _SERVED_OF_TEXTS
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Unused
    logprobs: int | None = None

    suffix: str | None = None
    prompt_embeds: Unused = NULL

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token. To echo without generating, the prompt's log-probabilities
        are always computed, even if they are not returned."""
        if not self.echo:
            return None
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    def prompts(self, use: ToolUse | None) -> tuple[Prompt, ...]:
        text = bytes(memoryview(self.prompt)).strip()
        is_list = text.startswith(b"[") and text[1:].lstrip().startswith((b'"', b"["))
        try:
            if not is_list:
                return (_prompt_decoder.decode(text),)
            return tuple(_prompt_decoder.decode(one) for one in _split(text))
        except msgspec.DecodeError:
            raise must("prompt", "be a string, token ids, or a list of either") from None


def _split(text: bytes) -> list[msgspec.Raw]:
    """The items of a list of prompts. Raises ``InvalidRequest`` for more than ``MAX_CHOICES``, and
    ``msgspec.DecodeError`` if ``text`` is not a list."""
    try:
        items = msgspec.structs.astuple(_prompts_decoder.decode(text))
    except msgspec.ValidationError as error:
        if "at most length" in str(error):
            raise wrong("prompt", f"at most {MAX_CHOICES} items") from None
        raise
    return [item for item in items if item is not NULL]
