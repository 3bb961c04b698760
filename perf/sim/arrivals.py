"""Random arrivals from one seed: Poisson or bursts, many sizes, several tenants."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.tasks.job import Priority
from perf.load.trace import TraceLoad
from perf.load.workload import Sizes, Speed
from perf.sim.replay.service import VOCABULARY
from protocol import OnDeadline

PROMPTS = Sizes(median=48, sigma=0.8, least=8, most=256)
_FIRST_OWN_ID = 2**18
"""First of the token ids that are of one prompt alone."""
ANSWERS = Sizes(median=24, sigma=0.7, least=4, most=96)


@dataclass(frozen=True, slots=True)
class SimArrival:
    """One request. ``length`` is how long its answer is by itself, up to ``max_tokens``.

    Deadlines, for the whole and for parts, count from ``at_s``; infinite where none is stated.
    """

    at_s: float
    prompt_tokens: int
    max_tokens: int
    length: int
    deadline_ms: float
    tenant: str
    priority: Priority
    on_deadline: OnDeadline = OnDeadline.ERROR
    first_token_ms: float = math.inf
    token_gap_ms: float = math.inf
    kind: str = ""
    """Kind that a cell's table tells apart; the orchestrator does not hear of it."""
    opening: tuple[int, ...] = ()
    """Beginning of the prompt, at most as long as the prompt, which requests have in common. The
    rest of it is like no other's."""
    session: str = ""
    """Conversation that it is a turn of."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt. The last is the answer's length, for the worker; none before it
        tells."""
        own = _FIRST_OWN_ID + round(1e5 * self.at_s) % (VOCABULARY - _FIRST_OWN_ID)
        ids = self.opening[: self.prompt_tokens - 1]
        return ids + (own,) * (self.prompt_tokens - 1 - len(ids)) + (self.length,)

    @property
    def is_open(self) -> bool:
        """Whether the orchestrator cannot know how long the answer will be."""
        return self.length != self.max_tokens


def trace_arrivals(
    load: TraceLoad, per_s: float, seconds: float, seed: int
) -> Iterator[SimArrival]:
    """Arrivals of a trace's requests."""
    cap_tokens = load.cap_tokens  # looks at the whole trace
    for request in load.requests(per_s, seconds, seed):
        yield SimArrival(
            at_s=request.at_s,
            prompt_tokens=request.prompt_tokens,
            max_tokens=cap_tokens,
            length=request.answer_tokens,
            deadline_ms=request.deadline_ms,
            tenant="",
            priority=Priority.INTERACTIVE,
            first_token_ms=request.first_token_ms,
            token_gap_ms=request.token_gap_ms,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """Rules by which requests are drawn. Deadlines as in ``load.workload``: ``patience`` times the
    service time.

    ``tenants`` maps names to their share of the arrivals. ``burst`` above 1 makes the rate swing
    between burst and 2 - burst times its mean, every ``burst_s``. ``open_share`` of the requests
    end by themselves somewhere before ``max_tokens``.
    """

    speed: Speed
    prompts: Sizes = PROMPTS
    answers: Sizes = ANSWERS
    patience: Sequence[float] = (1.5, 3.0, 6.0)
    margin_ms: float = 250.0
    tenants: Mapping[str, float] = field(default_factory=lambda: {"a": 1.0})
    batch_share: float = 0.0
    open_share: float = 0.0
    burst: float = 1.0
    burst_s: float = 20.0

    def arrivals(self, per_s: float, seconds: float, seed: int) -> Iterator[SimArrival]:
        """Arrivals in order of time, ``per_s`` on average."""
        rng = random.Random(seed)
        names, weights = list(self.tenants), list(self.tenants.values())
        most = per_s * max(1.0, self.burst)
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(most)) < seconds:  # thinning
            high = math.sin(2 * math.pi * at_s / self.burst_s) > 0
            rate = per_s * (self.burst if high else 2 - self.burst)
            if rng.random() * most < rate:
                yield self._one(at_s, rng, rng.choices(names, weights)[0])

    def _one(self, at_s: float, rng: random.Random, tenant: str) -> SimArrival:
        prompt, length = self.prompts.draw(rng), self.answers.draw(rng)
        # Margin and patience are for the real length: what clients want, not what they allow.
        service_ms = self.speed.service_ms(prompt, length)
        is_batch = rng.random() < self.batch_share
        deadline_ms = rng.choice(self.patience) * service_ms + self.margin_ms
        most = length
        if rng.random() < self.open_share:
            most = round(length * rng.uniform(1.05, 4.0)) + 1
        return SimArrival(
            at_s=at_s,
            prompt_tokens=prompt,
            max_tokens=most,
            length=length,
            deadline_ms=deadline_ms * (20 if is_batch else 1),
            tenant=tenant,
            priority=Priority.BATCH if is_batch else Priority.INTERACTIVE,
        )
