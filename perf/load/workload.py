"""Sizes of requests, and the engine speed on which their deadlines are based."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """A log-normal number of tokens, clipped: most are short, some are long."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        drawn = self.median * rng.lognormvariate(0.0, self.sigma)
        return round(min(max(drawn, self.least), self.most))


@dataclass(frozen=True, slots=True)
class Speed:
    """Time in ms of a request on a busy engine, from its start; deadlines are multiples of it."""

    prompt_token_ms: float
    token_ms: float

    def service_ms(self, prompt_tokens: int, max_tokens: int) -> float:
        return self.prompt_token_ms * prompt_tokens + self.token_ms * max_tokens
