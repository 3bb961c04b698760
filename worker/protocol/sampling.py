"""Sampling parameters: one type for every dialect, checked in one place."""

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_INT = 2**31 - 1
"""Far beyond any context or vocabulary; a larger number would not fit the engine's arrays."""


class InvalidSampling(ValueError):
    """A sampling parameter is out of range: ``field`` names it, the message says what fits."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a job asks of the sampler.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1) considers every token. ``logprobs`` None
    returns none, n the chosen token's and the n most likely ones'. Two jobs with the same prompt,
    parameters and ``seed`` draw the same random numbers whatever else is in the batch (WK-3).
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

    def check(self) -> None:
        """Raise ``InvalidSampling`` on the first value that is out of range."""
        if not 1 <= self.max_tokens <= MAX_INT:
            raise InvalidSampling("max_tokens", f"must be 1 to {MAX_INT}, got {self.max_tokens}")
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
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidSampling("logprobs", f"must be 0 to {MAX_LOGPROBS}, got {self.logprobs}")
