"""Mixed requests that arrive by chance: prompts, answers and deadlines of many sizes, one seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """One request, ``at_s`` after the beginning. The deadline counts from its arrival."""

    at_s: float
    prompt: list[int]
    max_tokens: int
    deadline_ms: float


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
    """Time that a request takes on a busy engine once it is started, in ms: the measure of
    deadlines."""

    prompt_token_ms: float
    token_ms: float

    def service_ms(self, prompt_tokens: int, max_tokens: int) -> float:
        return self.prompt_token_ms * prompt_tokens + self.token_ms * max_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Rules by which requests are drawn. A deadline is the request's own service time, times one of
    ``patience`` at random, plus ``margin_ms``: some clients are in a hurry, others are not. None
    asks for what only an idle engine could do."""

    speed: Speed
    vocab_size: int
    prompts: Sizes = Sizes(median=48, sigma=0.8, least=8, most=256)
    answers: Sizes = Sizes(median=24, sigma=0.7, least=4, most=96)
    patience: Sequence[float] = (1.5, 3.0, 5.0)
    margin_ms: float = 250.0

    def arrivals(self, per_s: float, seconds: float, seed: int) -> list[Arrival]:
        """Requests of a Poisson process of ``per_s`` for ``seconds``."""
        rng, arrivals, at_s = random.Random(seed), [], 0.0
        while (at_s := at_s + rng.expovariate(per_s)) < seconds:
            arrivals.append(self._one(at_s, rng))
        return arrivals

    def at_once(self, count: int, seed: int) -> list[Arrival]:
        """``count`` requests at the same time, to show what the service can take."""
        rng = random.Random(seed)
        return [self._one(0.0, rng) for _ in range(count)]

    def _one(self, at_s: float, rng: random.Random) -> Arrival:
        prompt_tokens, max_tokens = self.prompts.draw(rng), self.answers.draw(rng)
        service_ms = self.speed.service_ms(prompt_tokens, max_tokens)
        # Random ids share no prefix: what a cache would spare is not the matter here.
        prompt = [rng.randrange(16, self.vocab_size) for _ in range(prompt_tokens)]
        deadline_ms = rng.choice(self.patience) * service_ms + self.margin_ms
        return Arrival(at_s, prompt, max_tokens, round(deadline_ms, 1))
