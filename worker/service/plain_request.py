"""The plain contract: that of Triton's vLLM backend, name for name.

Read from its documentation and sample client: ``sampling_parameters`` is a JSON object whose
numbers may be strings; without it the request's own parameters count. Prompt text is prepended
to the output unless ``exclude_input_in_output``, which streaming always implies. Text, token
counts and log-probabilities are deltas when streaming. The last data response carries FINAL.
Unlike there, a stated ``max_tokens`` that the context cannot hold is an error, not a shorter
answer (WK-8); vLLM's default of 16 means up to the context's end.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from worker.core import Job, JobFinished, JobStarted, JobTokens
from worker.protocol import (
    Code,
    ModelCard,
    OnDeadline,
    Sampling,
    SamplingDefaults,
    TokenLogprob,
    excerpt,
    read_logit_bias,
    stated_of,
    unstated_of,
)
from worker.protocol import tensors as names
from worker.service.call import Call, InvalidCall, Responder, Tensors, strings
from worker.service.replies import as_shown
from worker.text.text_stream import TextStream
from worker.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""vLLM's own default."""


class CannotFit(ValueError):
    """Prompt and answer do not fit into the model's context; the message says what would."""


NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "length_penalty": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "stop_token_ids": [],
    "bad_words": [],
}
"""vLLM parameters that are accepted at the value that changes nothing, and refused otherwise."""

_DEADLINE_NAMES = (
    names.PARAM_DEADLINE_MS,
    names.PARAM_DEADLINE_UNIX_MS,
    names.PARAM_FIRST_TOKEN_MS,
    names.PARAM_TOKEN_GAP_MS,
    "on_deadline",
)

TRITONS_OWN = ("priority", "timeout", names.PARAM_TOKEN)
"""Parameters that a client states to Triton itself, or that were looked at before; they come
through and mean nothing here."""


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A parsed plain request. ``budget_ms`` and ``first_token_ms`` are relative to its receipt."""

    prompt: str
    stream: bool
    prepend_prompt: bool
    sampling: Sampling
    states_max_tokens: bool
    states_logprobs: bool
    budget_ms: float
    on_deadline: OnDeadline
    first_token_ms: float | None
    token_gap_ms: float | None
    finish_reason: bool
    cumulative_logprob: bool
    logprobs: bool
    """Whether a client wants them told; null where the sampling parameters ask for none."""
    num_input_tokens: bool
    num_output_tokens: bool

    def sampling_for(self, prompt_tokens: int, card: ModelCard) -> Sampling:
        """What to ask of the engine after a prompt of that many tokens. Raises ``CannotFit``."""
        context_tokens = card.context_tokens
        asked, room = self.sampling, context_tokens - prompt_tokens
        if room < 1:
            raise CannotFit(
                f"the prompt has {prompt_tokens} tokens; at most {context_tokens - 1} leave room"
                f" for a token of the answer{card.context_note}"
            )
        if asked.max_tokens <= room:
            return asked
        if self.states_max_tokens or asked.min_tokens > room:
            raise CannotFit(
                f"max_tokens is {asked.max_tokens}, but the context of {context_tokens} tokens"
                f" leaves {room} after a prompt of {prompt_tokens}: ask for at most {room}"
                f"{card.context_note}"
            )
        return msgspec.structs.replace(asked, max_tokens=room)


class _Stated(msgspec.Struct, forbid_unknown_fields=True):
    """What ``sampling_parameters`` may say. Lax types: numbers may come as strings."""

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
    deadline_ms: float | None = None
    deadline_unix_ms: float | None = None
    first_token_ms: float | None = None
    token_gap_ms: float | None = None
    on_deadline: OnDeadline = OnDeadline.ERROR


def parse_plain(
    call: Call,
    *,
    default_deadline_ms: float,
    unix_ms: float,
    vocab_size: int,
    defaults: SamplingDefaults | None = None,
) -> PlainRequest:
    """Read a request of the plain contract. Raises ``InvalidCall``, ``InvalidSampling``.

    ``defaults`` count for what it does not state, but for ``max_tokens``: that is 16 here.
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
    want_logprobs = bool(call.flag(names.RETURN_LOGPROBS))
    want_cumulative = bool(call.flag(names.RETURN_CUMULATIVE_LOGPROB))
    stated = _read_stated(call)
    if stated.on_deadline is OnDeadline.FIT:
        raise InvalidCall("on_deadline fit needs the orchestrator's forecast; here: error, partial")
    logprobs = stated.logprobs
    if logprobs is None and want_cumulative:
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
        **stated_of(stated),
    )
    if defaults is not None:
        sampling = defaults.fill(sampling, unstated_of(stated))
    sampling.check(vocab_size)
    return PlainRequest(
        prompt=prompt,
        stream=stream,
        prepend_prompt=not (stream if exclude is None else exclude),
        sampling=sampling,
        states_max_tokens=stated.max_tokens is not None,
        states_logprobs=stated.logprobs is not None,
        budget_ms=_budget_ms(stated, default_deadline_ms, unix_ms),
        on_deadline=stated.on_deadline,
        first_token_ms=_positive(names.PARAM_FIRST_TOKEN_MS, stated.first_token_ms),
        token_gap_ms=_positive(names.PARAM_TOKEN_GAP_MS, stated.token_gap_ms),
        finish_reason=bool(call.flag(names.RETURN_FINISH_REASON)),
        cumulative_logprob=want_cumulative,
        logprobs=want_logprobs,
        num_input_tokens=bool(call.flag(names.RETURN_NUM_INPUT_TOKENS)),
        num_output_tokens=bool(call.flag(names.RETURN_NUM_OUTPUT_TOKENS)),
    )


def _read_stated(call: Call) -> _Stated:
    raw = call.text(names.SAMPLING_PARAMETERS)
    source: dict[str, Any] = dict(call.parameters)
    if raw:
        try:
            read = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InvalidCall(f"{names.SAMPLING_PARAMETERS} is not JSON: {error}") from None
        if not isinstance(read, dict):
            raise InvalidCall(f"{names.SAMPLING_PARAMETERS} must be a JSON object")
        # A deadline is a property of the request: it counts wherever it stands.
        source = {k: v for k, v in source.items() if k in _DEADLINE_NAMES} | read
    stated: dict[str, Any] = {}
    for name, value in source.items():
        if name in NEUTRAL:
            if value is not None and str(value).lower() not in _spellings(NEUTRAL[name]):
                raise InvalidCall(
                    f"{name}={excerpt(repr(value))} is not supported; "
                    f"leave it out or at {NEUTRAL[name]!r}"
                )
        elif value is not None and name not in TRITONS_OWN and not name.startswith("triton_"):
            stated[name] = value
    try:
        json.dumps(stated, ensure_ascii=False).encode()
        return msgspec.convert(stated, _Stated, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidCall(f"{names.SAMPLING_PARAMETERS}: {excerpt(error, 200)}") from None
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise InvalidCall(
            f"{names.SAMPLING_PARAMETERS}: a string in it is no Unicode text"
        ) from None


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise InvalidCall(f"{name} must be milliseconds above 0, got {value:g}")
    return value


def _spellings(neutral: object) -> set[str]:
    spelled = {str(neutral).lower()}
    if not isinstance(neutral, bool) and isinstance(neutral, int):
        spelled.add(str(float(neutral)))
    return spelled


def _budget_ms(stated: _Stated, default_ms: float, unix_ms: float) -> float:
    budgets = [default_ms]
    if stated.deadline_ms is not None:
        budgets.append(stated.deadline_ms)
    if stated.deadline_unix_ms is not None:
        budgets.append(stated.deadline_unix_ms - unix_ms)
    if any(math.isnan(budget) for budget in budgets):
        raise InvalidCall("a deadline must be a number of milliseconds")
    return min(budgets)


class PlainReply:
    """One plain request: route and outlet in one, since it has a sender of its own."""

    def __init__(
        self,
        request: PlainRequest,
        job: Job,
        text: TextStream,
        responder: Responder,
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.job = job
        self.responder = responder
        self._text = text
        self._tokenizer = tokenizer
        self._stopped = False
        self._finished: JobFinished | None = None
        self._pieces = [request.prompt] if request.prepend_prompt else []
        self._new_tokens = 0
        self._cumulative = 0.0
        self._logprobs: list[dict[str, dict[str, Any]]] | None = (
            [] if request.logprobs and request.states_logprobs else None
        )
        self._ended = False

    @property
    def outlet(self) -> "PlainReply":
        return self

    @property
    def ended(self) -> bool:
        return self._ended

    def jobs(self) -> list[Job]:
        return [] if self._ended else [self.job]

    def started(self, event: JobStarted) -> None:
        pass

    def tokens(self, event: JobTokens) -> bool:
        if self._stopped:
            return False
        fed = self._text.feed(event.ids)
        count = len(event.ids) if fed.stopped_at is None else fed.stopped_at + 1
        self._stopped = fed.stopped_at is not None
        self._pieces.extend(fed.texts[:count])
        self._new_tokens += count
        if event.logprobs is not None:
            for token_id, logprob in zip(event.ids[:count], event.logprobs, strict=False):
                self._cumulative += logprob.logprob
                if self._logprobs is not None:
                    self._logprobs.append(self._describe(token_id, logprob))
        return self._stopped

    def paused(self) -> None:
        """Nobody can ask for it in this contract."""

    def resumed(self) -> None: ...

    def finished(self, event: JobFinished) -> None:
        if not self._stopped:
            tail, self._stopped = self._text.flush()
            self._pieces.append(tail)
        self._finished = as_shown(event, self._stopped)

    def flush(self) -> None:
        if self._ended:
            return
        end = self._finished
        if end is None:
            if self.request.stream and self._new_tokens:
                self.responder.send(self._tensors("None"))
            return
        if end.code is None:
            self.responder.send(self._tensors(end.reason.value), final=True)
        else:
            self.responder.fail(end.code, end.message)
        self._ended = True

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self.responder.fail(Code.INTERNAL, "the answer could not be sent")

    def _tensors(self, finish_reason: str) -> Tensors:
        """One response with everything since the last one, which is then forgotten."""
        request = self.request
        tensors: dict[str, Any] = {names.TEXT_OUTPUT: strings("".join(self._pieces))}
        if request.finish_reason:
            tensors[names.FINISH_REASON] = strings(finish_reason)
        if request.cumulative_logprob:
            tensors[names.CUMULATIVE_LOGPROB] = np.array([self._cumulative], dtype=np.float32)
        if request.logprobs:
            tensors[names.LOGPROBS] = strings(json.dumps(self._logprobs))
        if request.num_input_tokens:
            count = len(self.job.token_ids)
            tensors[names.NUM_INPUT_TOKENS] = np.array([count], dtype=np.uint32)
        if request.num_output_tokens:
            tensors[names.NUM_OUTPUT_TOKENS] = np.array([self._new_tokens], dtype=np.uint32)
        self._pieces, self._new_tokens = [], 0
        if self._logprobs is not None:
            self._logprobs = []
        return tensors

    def _describe(self, token_id: int, logprob: TokenLogprob) -> dict[str, dict[str, Any]]:
        """vLLM's form: token id → its logprob, rank and text; the chosen token's comes first.

        Of those in the list the rank is their place there, as equally likely ones have it too.
        """
        ranked = {token_id: (logprob.logprob, logprob.rank)}
        for rank, (top_id, top_logprob) in enumerate(logprob.top, start=1):
            ranked[top_id] = top_logprob, rank
        return {
            str(id): {"logprob": value, "rank": rank, "decoded_token": self._token_text(id)}
            for id, (value, rank) in ranked.items()
        }

    def _token_text(self, token_id: int) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return detokenizer.feed([token_id])[0] + detokenizer.flush()
