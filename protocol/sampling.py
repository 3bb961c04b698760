"""Sampling parameters: one type for every dialect, checked in one place."""

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 512
MAX_LOGIT_BIAS = 100.0
"""Maximum magnitude of a bias, as in OpenAI's API: enough to ban or force a token."""
MAX_PENALTY = 2.0
"""Maximum magnitude of presence and frequency penalties, as in OpenAI's API."""
MAX_REPETITION_PENALTY = 10.0
MAX_INT = 2**31 - 1
"""Maximum count or id: far beyond any context or vocabulary, but fits in the engine's arrays."""
_MAX_DIGITS = 10


class InvalidSampling(ValueError):
    """A sampling parameter is out of range: ``field`` names it; the message says what fits."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of a job.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1) considers every token. ``logprobs`` None
    returns none; n returns those of the chosen token and the n most likely tokens. Two jobs with
    the same prompt, parameters and ``seed`` draw the same random numbers in any batch (WK-3).

    ``min_p`` excludes tokens whose probability is below that share of the most likely token's
    (Nguyen et al. 2024). ``repetition_penalty`` divides the positive logits of tokens in prompt or
    answer and multiplies the negative ones (Keskar et al. 2019); ``presence_penalty`` and, times
    their count, ``frequency_penalty`` are subtracted from the logits of tokens in the answer, as
    OpenAI documents them. ``logit_bias`` has pairs ``(token id, number to add to its logit)``.

    A text ends with any of ``stop_token_ids``, as it does with the model's own end tokens but also
    under ``ignore_eos``; neither can come in the first ``min_tokens``. The token that ends a text
    is not part of it; special tokens within the text are, unless they are skipped.

    ``prompt_logprobs`` asks for those of the prompt's own tokens, in the terms of ``logprobs``;
    only with it may ``max_tokens`` be 0: the prompt is then read and nothing generated.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True

    def check(self, vocab_size: int | None = None) -> None:
        """Raise ``InvalidSampling`` on the first value that is out of range.

        Token ids are compared with the vocabulary size if it is known.
        """
        least = 1 if self.prompt_logprobs is None else 0
        if not least <= self.max_tokens <= MAX_INT:
            raise InvalidSampling(
                "max_tokens", f"must be {least} to {MAX_INT}, got {self.max_tokens}"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidSampling(
                "min_tokens",
                f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        if not 0.0 <= self.temperature <= 10.0:  # also catches NaN
            raise InvalidSampling("temperature", f"must be from 0 to 10, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidSampling("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if not -1 <= self.top_k <= MAX_INT:
            raise InvalidSampling("top_k", f"must be 0 (all) to {MAX_INT}, got {self.top_k}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidSampling("seed", "must fit in 64 bits")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidSampling(
                "stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}"
            )
        if any(not 0 < len(s) <= MAX_STOP_CHARS for s in self.stop):
            raise InvalidSampling("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
        if self.stop_token_ids:
            self._check_stop_tokens(MAX_INT if vocab_size is None else vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            top: int | None = getattr(self, name)
            if top is not None and not 0 <= top <= MAX_LOGPROBS:
                raise InvalidSampling(name, f"must be 0 to {MAX_LOGPROBS}, got {top}")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidSampling("min_p", f"must be from 0 to 1, got {self.min_p}")
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidSampling(
                "repetition_penalty",
                f"must be above 0 (1 changes nothing) and at most {MAX_REPETITION_PENALTY:g},"
                f" got {self.repetition_penalty}",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value: float = getattr(self, name)
            if not -MAX_PENALTY <= value <= MAX_PENALTY:
                raise InvalidSampling(
                    name, f"must be from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, got {value}"
                )
        if self.logit_bias:
            self._check_biases(vocab_size)

    def _check_stop_tokens(self, end: int) -> None:
        ids = self.stop_token_ids
        if len(ids) > MAX_STOP_TOKENS:
            raise InvalidSampling(
                "stop_token_ids", f"at most {MAX_STOP_TOKENS} tokens, got {len(ids)}"
            )
        if min(ids) < 0 or max(ids) >= end:
            raise InvalidSampling(
                "stop_token_ids", f"must be token ids of the model's vocabulary, 0 to {end - 1}"
            )

    def for_choice(self, index: int) -> "Sampling":
        """Parameters of a request's choice: its index changes a stated seed; otherwise all choices
        would be equal."""
        if not index or self.seed is None:
            return self
        seed = (self.seed + index + 2**63) % 2**64 - 2**63  # stays within 64 bits
        return msgspec.structs.replace(self, seed=seed)

    @property
    def length_is_stated(self) -> bool:
        """Whether only ``max_tokens`` ends the text."""
        return self.ignore_eos and not self.stop and not self.stop_token_ids

    def _check_biases(self, vocab_size: int | None) -> None:
        biases = dict(self.logit_bias)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidSampling(
                "logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, got {len(self.logit_bias)}"
            )
        if len(biases) < len(self.logit_bias):
            raise InvalidSampling("logit_bias", "names a token more than once")
        end = MAX_INT if vocab_size is None else vocab_size
        for token_id, bias in self.logit_bias:
            if not 0 <= token_id < end:
                raise InvalidSampling(
                    "logit_bias",
                    f"token id {token_id} is outside the model's vocabulary, 0 to {end - 1}",
                )
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise InvalidSampling(
                    "logit_bias",
                    f"must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g},"
                    f" got {bias} for token {token_id}",
                )


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's defaults for a request's sampling; None leaves a value to ``Sampling``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def fill(self, sampling: Sampling, unstated: Collection[str]) -> Sampling:
        """``sampling`` with the ``unstated`` parameters replaced by defaults, if there are any."""
        changes = {name: value for name in unstated if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(sampling, **changes) if changes else sampling


_LEFT_TO_MODELS = tuple(name for name in SamplingDefaults.__struct_fields__ if name != "max_tokens")


def stated_of(request: object) -> dict[str, Any]:
    """The parameters with defaults that a request states: those that are not None."""
    return {
        name: value for name in _LEFT_TO_MODELS if (value := getattr(request, name)) is not None
    }


def unstated_of(request: object) -> tuple[str, ...]:
    """Names of parameters that a request leaves None, for ``SamplingDefaults.fill`` to fill."""
    return tuple([name for name in _LEFT_TO_MODELS if getattr(request, name) is None])


def read_logit_bias(stated: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Convert JSON's form, whose keys are token ids as strings. Raises ``InvalidSampling``."""
    if stated and len(stated) > MAX_LOGIT_BIASES:  # before the loop, which may be long
        raise InvalidSampling("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, got {len(stated)}")
    biases = []
    for key, bias in (stated or {}).items():
        # int() would also take "+1", "1_0" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS):
            raise InvalidSampling(
                "logit_bias", f'keys must be token ids such as "42", got {key[:32]!r}'
            )
        biases.append((int(key), bias))
    return tuple(biases)


_THEIRS: Final = {"max_tokens": "max_new_tokens"}
_WHOLE: Final = ("top_k", "max_tokens")


class FoundDefaults(NamedTuple):
    """Defaults found; ``unfit`` lists those out of range and left out, as ``name=value``."""

    defaults: SamplingDefaults
    unfit: tuple[str, ...]


def defaults_of(stated: Mapping[str, Any]) -> FoundDefaults:
    """Defaults stated in the contents of a ``generation_config.json``."""
    found: dict[str, Any] = {}
    unfit = []
    for name in SamplingDefaults.__struct_fields__:
        theirs = _THEIRS.get(name, name)
        value = stated.get(theirs)
        if value is None:
            continue
        if _fits(name, value):
            found[name] = value
        else:
            unfit.append(f"{theirs}={value!r}")
    return FoundDefaults(SamplingDefaults(**found), tuple(unfit))


def _fits(name: str, value: object) -> bool:
    kinds = int if name in _WHOLE else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    try:
        Sampling(**({"max_tokens": 1} | {name: value})).check()  # type: ignore[arg-type]
    except InvalidSampling:
        return False
    return True
