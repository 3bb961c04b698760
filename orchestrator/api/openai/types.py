"""OpenAI's request bodies, as far as they are served here; the rest is refused by name.

``deadline_ms``, ``first_token_ms``, ``token_gap_ms``, ``on_deadline``, ``on_disconnect``,
``priority``, ``tenant``, ``session_id``, ``idle_keep_s`` and ``placement`` are ours;
``min_tokens``, ``ignore_eos``, ``top_k``, ``min_p``, ``repetition_penalty``, ``structured_outputs``
and ``guided_…`` have the names of vLLM's server. The official SDK sends them with ``extra_body``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

from orchestrator.api.http.fields import (
    FLEX,
    NULL,
    ServedValues,
    Unused,
    nothing,
    one_limit,
    refuse_unserved,
)
from orchestrator.api.http.grammars import GrammarRequest
from orchestrator.api.openai.chats import ChatMessage, chat_of
from orchestrator.api.openai.tools import tool_use_of
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import ToolUse
from orchestrator.tasks.job import Job, Priority, Prompt
from protocol import OnDeadline

MAX_CHOICES = 128
"""Most choices of a request, all prompts together: each is a task. OpenAI's bound for ``n``."""
_Prompts = msgspec.defstruct(
    "_Prompts",
    [(f"prompt_{at}", msgspec.Raw, NULL) for at in range(MAX_CHOICES)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list that stops being read once it is too long: a million prompts would take a second."""
_prompts_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Prompts)
_prompt_decoder: msgspec.json.Decoder[str | tuple[int, ...]] = msgspec.json.Decoder(
    str | tuple[int, ...]
)


_SERVED = {
    "allowed_token_ids": ServedValues(nothing, "send structured_outputs or logit_bias"),
    "best_of": ServedValues(
        lambda value: value == 1, "send n and logprobs, and choose among the answers"
    ),
    "bad_words": ServedValues(nothing, "send logit_bias, or look for them in the answer"),
    "detokenize": ServedValues(lambda value: value is True, "answers have text"),
    "logits_processors": ServedValues(nothing, "send structured_outputs or logit_bias"),
    "prompt_logprobs": ServedValues(
        lambda value: False, "send a prompt with echo and logprobs to /v1/completions"
    ),
    "return_tokens_as_token_ids": ServedValues(nothing, "send return_token_ids"),
    "truncate_prompt_tokens": ServedValues(
        nothing, "what does not fit the context is refused, not cut; send a shorter prompt"
    ),
    "use_beam_search": ServedValues(nothing, "answers are sampled; send n"),
}
"""Fields of which only some values are served. Ignoring them would change the answer."""
_SERVED |= dict.fromkeys(
    ("ebnf", "grammar", "json_schema", "regex"),
    ServedValues(nothing, "send structured_outputs, or response_format"),
)
_SERVED_OF_DYNAMO = {
    name: ServedValues(nothing, "send it next to nvext, not in it")
    for name in ("guided_choice", "guided_grammar", "guided_json", "guided_regex")
}
_SERVED_OF_CHATS = {
    **_SERVED,
    "add_special_tokens": ServedValues(nothing, "the chat template has its own"),
    "audio": ServedValues(nothing, "only text is served"),
    "chat_template": ServedValues(
        nothing, "the model's own is used; send chat_template_kwargs, or a prompt to completions"
    ),
    "documents": ServedValues(nothing, "send them as text in messages"),
    "echo": ServedValues(nothing, "it belongs to /v1/completions"),
    "function_call": ServedValues(
        lambda value: value in ("none", "auto"), "send tool_choice, which took its place"
    ),
    "functions": ServedValues(nothing, "send tools, which took its place"),
    "modalities": ServedValues(lambda value: value == ["text"], "only text is served"),
    "prediction": ServedValues(nothing, "predicted outputs are not served", is_hint=True),
    "web_search_options": ServedValues(
        lambda value: False, "web search is not served", is_hint=True
    ),
}
_SERVED_OF_TEXTS = {
    **_SERVED,
    "add_special_tokens": ServedValues(
        bool, "a prompt gets the model's own; send token ids, which get none"
    ),
    "prompt_embeds": ServedValues(nothing, "send a prompt, or token ids"),
    "suffix": ServedValues(nothing, "send a prompt with the marks that the model infills by"),
}


def tier_of(priority: Priority) -> str:
    """The ``service_tier`` that serves a request: the usual one, or flex for what may wait."""
    return FLEX if priority is Priority.BATCH else "default"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Unused = NULL


class AnswerOptions(NamedTuple):
    """Parts of an answer besides its text."""

    usage: bool = False
    """Whether a stream ends with the usage of all choices."""
    running_usage: bool = False
    """Whether each chunk has the usage of its own choice so far."""
    token_ids: bool = False
    stop_in_text: bool = False
    echo: bool = False
    """Whether the prompt precedes the text, with log-probabilities if the text has them."""
    tier: bool = False
    """Whether the answer names the ``service_tier`` that it was served in."""

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
        """Names of the tools of free text."""
        return self.tools.free_texts if self.tools else frozenset()


class AgentHints(msgspec.Struct, frozen=True):
    """What agents tell Dynamo of a request; the priority has a meaning here."""

    priority: int | None = None


class DynamosBody(msgspec.Struct, frozen=True):
    """Dynamo's additions. Forms of the answer have names of their own here."""

    agent_hints: AgentHints | None = None
    guided_choice: msgspec.Raw = NULL
    guided_grammar: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL
    guided_regex: msgspec.Raw = NULL


class OpenAiRequest(GrammarRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that both kinds of completion have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None

    # vLLM's
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

    # harmless
    user: Unused = NULL
    metadata: Unused = NULL
    store: Unused = NULL
    service_tier: str | None = None
    safety_identifier: Unused = NULL
    prompt_cache_key: Unused = NULL
    prompt_cache_retention: Unused = NULL

    served: ClassVar[Mapping[str, ServedValues]] = {}
    """Fields of which only some values are served."""

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for the first unsupported value."""
        refuse_unserved(self, self.served)
        if self.nvext is not None:
            refuse_unserved(self.nvext, _SERVED_OF_DYNAMO)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")
        if self.wanted_prompt_logprobs() is not None and self.on_deadline is not OnDeadline.ERROR:
            raise InvalidRequest(
                "on_deadline must be error where log-probabilities of the prompt are asked for: "
                "they come whole or not at all",
                field="on_deadline",
            )

    def own_sampling(self) -> Mapping[str, Any]:
        return {
            "prompt_logprobs": self.wanted_prompt_logprobs(),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "skip_special_tokens": self.skip_special_tokens is not False,
        }

    def wanted_prompt_logprobs(self) -> int | None:
        """How many alternatives to return per prompt token; None: not even its own."""
        return None

    def wants_one_piece(self) -> bool:
        return not self.stream

    def hinted_priority(self) -> int | None:
        hints = self.nvext and self.nvext.agent_hints
        return hints.priority if hints else None

    def stated_tier(self) -> str | None:
        return self.service_tier

    def prompts(self, use: ToolUse | None) -> tuple[Prompt, ...]:
        """The prompts, each with its own choices; the model sees the tools that it may ``use``.
        Raises ``InvalidRequest`` for prompts that are not served."""
        raise NotImplementedError

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None for none. Raises ``InvalidRequest``."""
        return None

    def choices_per_prompt(self, prompts: int) -> int:
        """How many choices each of ``prompts`` gets. Raises ``InvalidRequest`` for too many."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise InvalidRequest(f"n must be 1 to {MAX_CHOICES}, got {n}", field="n")
        if n * prompts > MAX_CHOICES:
            raise _too_many("n", "choices, those of all prompts together")
        return n

    def answer_options(self) -> AnswerOptions:
        options = self.stream_options or StreamOptions()
        usage = bool(options.include_usage)
        return AnswerOptions(
            usage=usage,
            running_usage=usage and bool(options.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            stop_in_text=bool(self.include_stop_str_in_output),
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
    echo: bool | None = None

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
        return tool_use_of(self.tools, self.tool_choice, is_parallel=is_parallel)

    def prompts(self, use: ToolUse | None) -> tuple[Prompt, ...]:
        return (chat_of(self, use.tools if use else ()),)


class CompletionRequest(OpenAiRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``."""

    served: ClassVar[Mapping[str, ServedValues]] = _SERVED_OF_TEXTS
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Unused
    logprobs: int | None = None

    echo: bool | None = None
    suffix: str | None = None
    prompt_embeds: Unused = NULL

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token. To echo without generating, a prompt is read for its
        log-probabilities, returned or not."""
        if not self.echo:
            return None
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    def answer_options(self) -> AnswerOptions:
        return super().answer_options()._replace(echo=bool(self.echo))

    def prompts(self, use: ToolUse | None) -> tuple[Prompt, ...]:
        text = bytes(memoryview(self.prompt)).strip()
        is_list = text.startswith(b"[") and text[1:].lstrip().startswith((b'"', b"["))
        try:
            if not is_list:
                return (_prompt_decoder.decode(text),)
            return tuple(_prompt_decoder.decode(one) for one in _split(text))
        except msgspec.DecodeError:
            raise InvalidRequest(
                "prompt must be a string, token ids, or a list of either", field="prompt"
            ) from None


def _split(text: bytes) -> list[msgspec.Raw]:
    """The items of a list of at most ``MAX_CHOICES`` prompts. Raises ``InvalidRequest`` for more,
    and ``msgspec.DecodeError`` if it is not a list."""
    try:
        items = msgspec.structs.astuple(_prompts_decoder.decode(text))
    except msgspec.ValidationError as error:
        if "at most length" in str(error):
            raise _too_many("prompt", "items") from None
        raise
    return [item for item in items if item is not NULL]


def _too_many(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: at most {MAX_CHOICES} {what}", field=field)
