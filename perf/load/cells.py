"""Random mixed requests with deadlines; the best number of rows depends on the mix.

Half of the requests ask for a short fact, half for a story of about 170 tokens. Clients do not
state the length of the answer. Rates are multiples of the capacity, which is the highest rate at
which first come, first served meets 95 % of such requests within 2 s.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from orchestrator.tasks.job import Priority
from perf.load.workload import Sizes
from worker.runner.synthetic import StepCost

CAP_TOKENS = 512
"""Value of ``max_tokens`` in every request."""
DEMO_COST: Final = StepCost(2.5e-3, 0.219e-3, 0.15e-3)
"""Step cost of the demo engine on the machine for which these deadlines were chosen: 6 ms with 16
rows, 16.5 ms with 64."""


class CellRequest(NamedTuple):
    """One future request. ``answer_tokens`` is the approximate natural length of its answer."""

    at_s: float
    kind: str
    prompt_tokens: int
    answer_tokens: int
    deadline_ms: float
    tenant: str
    priority: Priority


@dataclass(frozen=True, slots=True)
class CellStream:
    """Requests of one kind. They arrive at random, ``per_s`` on average, in the first ``on_s`` of
    every ``every_s``. Each has one of the deadlines."""

    kind: str
    per_s: float
    prompts: Sizes
    answers: Sizes
    deadlines_ms: tuple[float, ...]
    tenant: str = "all"
    priority: Priority = Priority.INTERACTIVE
    on_s: float = 1.0
    every_s: float = 1.0

    def requests(self, seconds: float, rng: random.Random) -> Iterator[CellRequest]:
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(self.per_s)) < seconds:
            if at_s % self.every_s > self.on_s:
                continue
            yield CellRequest(
                at_s,
                self.kind,
                self.prompts.draw(rng),
                self.answers.draw(rng),
                rng.choice(self.deadlines_ms),
                self.tenant,
                self.priority,
            )


@dataclass(frozen=True, slots=True)
class Mix:
    """Several kinds together. ``focus`` is the kind with its own column in a table, if any."""

    name: str
    streams: tuple[CellStream, ...]
    focus: str = ""

    @property
    def per_s(self) -> float:
        """Requests per second on average; for bursts, within them."""
        return sum(stream.per_s for stream in self.streams)

    def requests(self, seconds: float, seed: int) -> list[CellRequest]:
        """Requests in order of time; a seed always gives the same ones."""
        return sorted(
            request
            for number, stream in enumerate(self.streams)
            for request in stream.requests(seconds, random.Random(1000 * seed + number))
        )


_PROMPTS = Sizes(median=28, sigma=0.25, least=12, most=60)
_FACTS = Sizes(median=18, sigma=0.4, least=4, most=49)
_STORIES = Sizes(median=170, sigma=0.22, least=60, most=320)
_ANY = Sizes(median=60, sigma=0.6, least=10, most=200)
_PAGES = Sizes(median=1500, sigma=0.01, least=1400, most=1600)
_FACT = CellStream("facts", 1.0, _PROMPTS, _FACTS, (2000.0,))
_STORY = CellStream("stories", 1.0, _PROMPTS, _STORIES, (2000.0,))


def mixes(capacity: float) -> list[Mix]:
    """All cells, for an engine with this ``capacity`` in requests per second."""
    twice, share = 2 * capacity, capacity / 25

    def both(per_s: float, deadlines_ms: tuple[float, ...] = (2000.0,)) -> tuple[CellStream, ...]:
        return tuple(
            replace(each, per_s=per_s / 2, deadlines_ms=deadlines_ms) for each in (_FACT, _STORY)
        )

    small = CellStream("small", 4 * share, _PROMPTS, _ANY, (2000.0,), tenant="small")
    batch = replace(
        _STORY,
        kind="batch",
        per_s=24 * share,
        priority=Priority.BATCH,
        deadlines_ms=(10_000.0,),
    )
    asked = replace(_STORY, kind="interactive", per_s=8 * share, deadlines_ms=(1500.0,))
    long = CellStream("long", 1.0, _PAGES, _FACTS, (4000.0,))
    short = replace(_STORY, kind="short", per_s=8 * share, deadlines_ms=(1000.0,))
    flood = tuple(replace(each, tenant="big") for each in both(2.5 * capacity))
    bursts = tuple(replace(each, on_s=4.0, every_s=8.0) for each in both(3 * capacity))
    return [
        Mix("half-capacity", both(capacity / 2)),
        Mix("capacity", both(capacity)),
        Mix("twice", both(twice)),
        Mix("bursts", bursts),
        Mix("tight", both(twice, (700.0, 1200.0, 2000.0))),
        Mix("flood", (*flood, small), "small"),
        Mix("flood-alone", (small,), "small"),
        Mix("batch", (batch, asked), "interactive"),
        Mix("long-prompts", (long, short), "short"),
        Mix("short-alone", (short,), "short"),
    ]
