"""Parses requests of the plain contract, which has the same names as Triton's vLLM backend.

The rules come from its documentation and sample client: ``sampling_parameters`` is a JSON object
whose numbers may be strings; without it, the request's own parameters count. Prompt text is
prepended to the output unless ``exclude_input_in_output``, which streaming always implies. Text,
token counts and log-probabilities are deltas when streaming. With ``n`` above 1 each output has an
element for each text. The last data response carries FINAL. One difference: a stated ``max_tokens``
that does not fit in the context is an error, not a shorter answer (WK-8). With vLLM's default of
16, the answer stops at the end of the context.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol import (
    Grammar,
    GrammarKind,
    InvalidGrammar,
    ModelCard,
    OnDeadline,
    Sampling,
    SamplingDefaults,
    excerpt,
    read_logit_bias,
    stated_of,
    unstated_of,
)
from protocol import tensors as names
from worker.errors import ContextOverflow, InvalidCall
from worker.service.call import Call

_KINDS: Mapping[str, GrammarKind] = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
    "json_object": GrammarKind.JSON_OBJECT,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
_NO_KINDS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
"""vLLM options that have no effect here."""
_WHOLE = ("structured_outputs", "guided_decoding")


def _grammar_of(stated: "Stated") -> Grammar | None:
    """The grammar that the parameters ask for, or None. Raises ``InvalidCall``."""
    asked = [(field, *one) for field in _WHOLE for one in _options(field, getattr(stated, field))]
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(stated, f"guided_{name}")) is not None:
            asked.append((f"guided_{name}", name, value))
    if not asked:
        return None
    field, name, value = asked[0]
    if len(asked) > 1:
        raise InvalidCall(f"{field} and {asked[1][0]}: expected one thing that the text must match")
    kind = _KINDS[name]
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_any = kind is GrammarKind.JSON_OBJECT
        grammar = Grammar(kind, "" if is_any else text, lenient=kind is GrammarKind.JSON_SCHEMA)
        grammar.check()
    except (InvalidGrammar, ValueError, RecursionError) as error:
        raise InvalidCall(f"{field}: {excerpt(error, 200)}") from None
    return grammar


def _options(field: str, value: Any) -> list[tuple[str, Any]]:
    """The items of a JSON object, which may be given as a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidCall(f"{field} must be a JSON object") from None
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InvalidCall(f"{field} must be a JSON object")
    found = [
        (kind, one) for kind, one in value.items() if one not in (None, False) and kind in _KINDS
    ]
    unknown = [kind for kind in value if kind not in _KINDS and kind not in _NO_KINDS]
    if len(found) != 1 or unknown:
        raise InvalidCall(f"{field}: expected exactly one of {', '.join(_KINDS)}")
    return found


MAX_CHOICES = 128
"""Maximum ``n``, as on the orchestrator's OpenAI routes."""
DEFAULT_MAX_TOKENS = 16
"""vLLM's default of ``max_tokens``."""
_NEUTRAL: Mapping[str, object] = {
    "length_penalty": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "bad_words": [],
}
"""vLLM parameters that are accepted only at the value that has no effect."""
_TRITONS_OWN = ("priority", "timeout", names.PARAM_TOKEN)
"""Request parameters that Triton reads or that are checked earlier; ignored here."""
_DEADLINES = (
    names.PARAM_DEADLINE_MS,
    names.PARAM_DEADLINE_UNIX_MS,
    names.PARAM_FIRST_TOKEN_MS,
    names.PARAM_TOKEN_GAP_MS,
)
"""Deadline parameters. They count wherever they are given; the earliest wins (DL-1)."""


class Stated(msgspec.Struct, forbid_unknown_fields=True):
    """Fields that ``sampling_parameters`` may have. Types are lax: numbers may be strings."""

    n: int = 1
    """Number of texts; each is an element of the outputs."""
    best_of: int | None = None
    """Must equal ``n`` if it is given: every text is returned."""
    include_stop_str_in_output: bool = False
    """Whether the stop string or token that ends a text is part of it."""
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    """Has no effect, as in Triton's vLLM backend: the contract has no output for them."""
    structured_outputs: Any = None
    guided_decoding: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    deadline_ms: float | None = None
    deadline_unix_ms: float | None = None
    first_token_ms: float | None = None
    token_gap_ms: float | None = None
    on_deadline: OnDeadline = OnDeadline.ERROR


_OUTPUTS = (
    names.FINISH_REASON,
    names.CUMULATIVE_LOGPROB,
    names.LOGPROBS,
    names.NUM_INPUT_TOKENS,
    names.NUM_OUTPUT_TOKENS,
)
"""Optional outputs; the flag ``return_…`` asks for one."""


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A parsed plain request."""

    prompt: str
    stream: bool
    prepend_prompt: bool
    stated: Stated
    sampling: Sampling
    grammar: Grammar | None
    budget_ms: float
    """The time from its receipt to its deadline."""
    outputs: frozenset[str]
    """The ``_OUTPUTS`` that it asks for; log-probabilities are null if they are not stated."""

    def sampling_for(self, prompt_tokens: int, card: ModelCard) -> Sampling:
        """Sampling to request for a prompt of ``prompt_tokens``. Raises ``ContextOverflow``."""
        context_tokens = card.context_tokens
        asked, room = self.sampling, context_tokens - prompt_tokens
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {prompt_tokens} tokens, but this model's maximum context length is"
                f" {context_tokens} tokens: at most {context_tokens - 1} leave room for a token of"
                f" the answer{card.context_note}"
            )
        if asked.max_tokens <= room:
            return asked
        if self.stated.max_tokens is not None or asked.min_tokens > room:
            raise ContextOverflow(
                f"max_tokens is {asked.max_tokens}, but this model's maximum context length is"
                f" {context_tokens} tokens, which leaves {room} after a prompt of {prompt_tokens}:"
                f" ask for at most {room}{card.context_note}"
            )
        return msgspec.structs.replace(asked, max_tokens=room)


def parse_plain(
    call: Call,
    *,
    default_deadline_ms: float,
    unix_ms: float,
    vocab_size: int,
    defaults: SamplingDefaults | None = None,
) -> PlainRequest:
    """Parse a request of the plain contract. Raises ``InvalidCall``, ``InvalidSampling``.

    ``defaults`` apply to parameters that it omits, except ``max_tokens``, whose default is 16 here.
    """
    prompt = call.text(names.TEXT_INPUT)
    if prompt is None:
        raise InvalidCall(f"input {names.TEXT_INPUT} is missing")
    stream = bool(call.flag(names.STREAM))
    exclude = call.flag(names.EXCLUDE_INPUT_IN_OUTPUT)
    if stream and exclude is False:
        raise InvalidCall(
            f"{names.EXCLUDE_INPUT_IN_OUTPUT} must not be false when streaming: "
            "deltas never repeat the prompt"
        )
    outputs = frozenset(name for name in _OUTPUTS if call.flag(f"return_{name}"))
    stated = _read_stated(call)
    if stated.on_deadline is OnDeadline.FIT:
        raise InvalidCall(
            "on_deadline fit needs the orchestrator's forecast; here: error, partial, finish"
        )
    if not 1 <= stated.n <= MAX_CHOICES:
        raise InvalidCall(f"n must be 1 to {MAX_CHOICES}, got {excerpt(stated.n)}")
    if stated.best_of not in (None, stated.n):
        raise InvalidCall(f"best_of must be n, which is {stated.n}, or left out")
    logprobs = stated.logprobs
    if logprobs is None and names.CUMULATIVE_LOGPROB in outputs:
        logprobs = 0
    sampling = Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if stated.max_tokens is None else stated.max_tokens,
        min_tokens=stated.min_tokens,
        seed=stated.seed,
        stop=(stated.stop,) if isinstance(stated.stop, str) else tuple(stated.stop or ()),
        ignore_eos=stated.ignore_eos,
        logprobs=logprobs,
        presence_penalty=stated.presence_penalty,
        frequency_penalty=stated.frequency_penalty,
        logit_bias=read_logit_bias(stated.logit_bias),
        stop_token_ids=tuple(stated.stop_token_ids or ()),
        skip_special_tokens=stated.skip_special_tokens,
        **stated_of(stated),
    )
    if defaults is not None:
        sampling = defaults.fill(sampling, unstated_of(stated))
    sampling.check(vocab_size)
    grammar = _grammar_of(stated)
    for name in (names.PARAM_FIRST_TOKEN_MS, names.PARAM_TOKEN_GAP_MS):
        if (value := getattr(stated, name)) is not None and not value > 0:
            raise InvalidCall(f"{name} must be milliseconds above 0, got {value:g}")
    return PlainRequest(
        prompt,
        stream,
        not (stream if exclude is None else exclude),
        stated,
        sampling,
        grammar,
        _budget_ms(stated, default_deadline_ms, unix_ms),
        outputs,
    )


def _read_stated(call: Call) -> Stated:
    raw = call.text(names.SAMPLING_PARAMETERS)
    if not raw:
        return _convert(call.parameters)
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidCall(f"{names.SAMPLING_PARAMETERS} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise InvalidCall(f"{names.SAMPLING_PARAMETERS} must be a JSON object")
    beside = {k: v for k, v in call.parameters.items() if k in (*_DEADLINES, "on_deadline")}
    stated, first = _convert(beside | read), _convert(beside)
    earliest = {name: _earlier(getattr(stated, name), getattr(first, name)) for name in _DEADLINES}
    return msgspec.structs.replace(stated, **earliest)


def _convert(source: Mapping[str, Any]) -> Stated:
    """Convert parameters to typed fields, without those that have no effect."""
    stated: dict[str, Any] = {}
    for name, value in source.items():
        if name in _NEUTRAL:
            if value is not None and str(value).lower() not in _spellings(_NEUTRAL[name]):
                raise InvalidCall(
                    f"{name}={excerpt(repr(value))} is not supported; "
                    f"leave it out or at {_NEUTRAL[name]!r}"
                )
        elif value is not None and name not in _TRITONS_OWN and not name.startswith("triton_"):
            stated[name] = value
    try:
        json.dumps(stated, ensure_ascii=False).encode()
        return msgspec.convert(stated, Stated, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidCall(f"{names.SAMPLING_PARAMETERS}: {excerpt(error, 200)}") from None
    except UnicodeEncodeError:  # JSON can contain half of a surrogate pair
        raise InvalidCall(
            f"{names.SAMPLING_PARAMETERS}: a string in it is not Unicode text"
        ) from None


def _spellings(neutral: object) -> set[str]:
    spelled = {str(neutral).lower()}
    if not isinstance(neutral, bool) and isinstance(neutral, int):
        spelled.add(str(float(neutral)))
    return spelled


def _earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two times; None if both are None. NaN is kept and refused later."""
    if one is None or other is None:
        return other if one is None else one
    return other if math.isnan(other) or other < one else one


def _budget_ms(stated: Stated, default_ms: float, unix_ms: float) -> float:
    budgets = [default_ms]
    if stated.deadline_ms is not None:
        budgets.append(stated.deadline_ms)
    if stated.deadline_unix_ms is not None:
        budgets.append(stated.deadline_unix_ms - unix_ms)
    if any(math.isnan(budget) for budget in budgets):
        raise InvalidCall("a deadline must be a number of milliseconds")
    return min(budgets)
