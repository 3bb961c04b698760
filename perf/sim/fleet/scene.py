"""What a fleet is put to: instances, a balancer, the requests of a real service."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.tasks.deadline import Deadline
from perf.load.trace import TraceLoad, TraceRow, read_trace
from perf.load.workload import Speed
from perf.sim.fleet.instance import FleetRequest, InstanceKind
from perf.sim.fleet.member import Expected
from worker.runner.synthetic import StepCost

KINDS = tuple(
    InstanceKind(StepCost(factor * 6e-3, factor * 0.25e-3, factor * 20e-6), slots=8)
    for factor in (1, 1.5, 2)
)
"""Three speeds: 8, 12 and 16 ms a step with every slot taken."""
PATIENCE = (1.5, 3.0, 6.0)
"""Deadlines, in equal parts of each, in multiples of what a request takes on an instance of the
middle speed with every slot taken."""
SKEW = 3.0
"""How many times the share of another orchestrator the first one gets of an uneven balancer."""
TENANTS, FLOOD = 10, 10.0
"""Other tenants beside the one that floods, and how many times as much as one of them it offers."""
FLOODER = "flooder"
_LENGTHS = 16


@dataclass(frozen=True, slots=True)
class FleetScene:
    """One load. ``load`` is a multiple of what all instances together can do."""

    name: str
    instances: int
    members: int
    load: float
    is_uneven: bool = False
    """Whether the balancer gives one orchestrator three times as much as another, and one tenant
    offers ten times what each of ten others does."""
    stale_s: float = 0.25
    """Seconds between two reports of an instance: a lane's heartbeat."""
    warm_s: float = 6.0
    seconds: float = 6.0
    cool_s: float = 2.0
    """Seconds for which requests go on coming after those that count."""
    bound: int = 100
    """Most requests that wait at one orchestrator, as ``queue.max_waiting`` has it."""
    kinds: tuple[InstanceKind, ...] = KINDS
    """Kinds of instances, of which there are as many of each, in turn."""

    def __str__(self) -> str:
        uneven = ", one door and one tenant with more than the others" * self.is_uneven
        return (
            f"{self.name}: {self.instances} instances, {self.members} orchestrators, load "
            f"{self.load:g}, reports every {1000 * self.stale_s:g} ms{uneven}"
        )

    @property
    def fleet(self) -> list[InstanceKind]:
        """Kinds of all instances."""
        return list(itertools.islice(itertools.cycle(self.kinds), self.instances))

    @property
    def middle(self) -> Speed:
        """Times per token of an instance of the middle kind with every slot taken."""
        kind = self.kinds[len(self.kinds) // 2]
        return Speed(1000 * kind.cost.prompt_token_s, 1000 * kind.step_s(kind.slots))


def scenes(instances: int, members: int) -> dict[str, FleetScene]:
    """All scenes by name: a load that fits, the same with reports four times as old, and more than
    fits, which is uneven as well."""
    found = (
        FleetScene("fits", instances, members, 0.9),
        FleetScene("stale", instances, members, 0.9, stale_s=1.0),
        FleetScene("uneven", instances, members, 2.0, is_uneven=True),
    )
    return {scene.name: scene for scene in found}


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The requests of a trace, with nothing divided: lengths are those that the service saw."""

    rows: Sequence[TraceRow]

    @classmethod
    def of(cls, trace: Path) -> "FleetLoad":
        """The load of a trace's file. Raises ``TraceError``."""
        return cls(tuple(read_trace(trace)))

    @property
    def expected(self) -> Expected:
        """Lengths of answers, equally likely."""
        lengths = sorted(row.answer_tokens for row in self.rows)
        middles = [(at + 0.5) / _LENGTHS for at in range(_LENGTHS)]
        return Expected(tuple(float(lengths[int(at * len(lengths))]) for at in middles))

    def capacity(self, kinds: Sequence[InstanceKind]) -> float:
        """Requests per second that the instances can do with every slot taken."""
        count = len(self.rows)
        prompt = sum(row.prompt_tokens for row in self.rows) / count
        answer = sum(row.answer_tokens for row in self.rows) / count
        return sum(kind.per_s(prompt, answer) for kind in kinds)

    def requests(self, scene: FleetScene, seed: int) -> Iterator[FleetRequest]:
        """Requests in order of time, each with the door that the balancer has chosen for it."""
        load = TraceLoad(
            self.rows,
            scene.middle,
            is_poisson=True,
            patience=PATIENCE,
            prompt_scale=1,
            answer_scale=1,
        )
        rng = random.Random(f"{seed} doors")
        tenants, weights = _tenants(scene)
        doors = _doors(scene, rng)
        per_s = scene.load * self.capacity(scene.fleet)
        seconds = scene.warm_s + scene.seconds + scene.cool_s
        for number, asked in enumerate(load.requests(per_s, seconds, seed)):
            yield FleetRequest(
                id=str(number),
                number=number,
                door=next(doors),
                tenant=rng.choices(tenants, weights)[0],
                arrived=asked.at_s,
                deadline=Deadline(asked.at_s + asked.deadline_ms / 1000, 0),
                prompt_tokens=asked.prompt_tokens,
                length=asked.answer_tokens,
            )


def _tenants(scene: FleetScene) -> tuple[list[str], list[float]]:
    others = [f"tenant-{number}" for number in range(TENANTS)]
    if scene.is_uneven:
        return [FLOODER, *others], [FLOOD, *[1.0] * TENANTS]
    return others, [1.0] * TENANTS


def _doors(scene: FleetScene, rng: random.Random) -> Iterator[int]:
    doors = range(scene.members)
    if not scene.is_uneven:
        yield from itertools.cycle(doors)
    weights = [SKEW if door == 0 else 1.0 for door in doors]
    while True:
        yield rng.choices(doors, weights)[0]
