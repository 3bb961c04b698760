"""One of many orchestrators: the product's queue, ranks and choice, and a view of the instances.

What it sees of an instance is the latest report, as old as that is, and what it has itself sent
there or got back since (as ``Instance.load``).
"""

import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from orchestrator.instances.candidate import Candidate
from orchestrator.placement import Demand, Requirements, place
from orchestrator.prediction import Costs, Due, urgency
from orchestrator.prediction.forecaster import BACKGROUND_CHANCE, MIN_WAIT_MS, USUAL
from orchestrator.prediction.step_model import MIN_SHARE
from orchestrator.queue.task_queue import TaskQueue
from perf.sim.fleet.instance import FleetRequest, InstanceKind
from perf.sim.fleet.sharing import Sharing

WAIT_PER_DRAIN = 2.0
"""Expected wait over the time in which the waiting work could be done, as the forecaster has it."""
_DRAWS = 5
"""Instances that are drawn for each that is wanted, before all are looked at."""
_MODEL, _VOCABULARY = "sim", b"sim"
_NEEDS = Requirements(_MODEL, _VOCABULARY)


@dataclass(frozen=True)
class Expected:
    """What every orchestrator has learnt: equally likely lengths of answers, in rising order."""

    lengths: tuple[float, ...]

    @cached_property
    def usual(self) -> int:
        return math.ceil(self.lengths[int(USUAL * len(self.lengths))])

    @cached_property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)


class Reports:
    """What all instances last said of themselves, and candidates made of it."""

    def __init__(self, kinds: Sequence[InstanceKind], expected: Expected) -> None:
        self.kinds = kinds
        self.slots = [kind.slots for kind in kinds]
        by_kind = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self.kind_numbers = [by_kind[kind] for kind in kinds]
        """Number of each instance's kind."""
        self.loads = [0] * len(kinds)
        self.with_room: dict[tuple[int, int], list[int]] = {}
        """Numbers of the instances that have room by their last report, in rising order, by kind
        and load."""
        for number, kind_number in enumerate(self.kind_numbers):
            self.with_room.setdefault((kind_number, 0), []).append(number)
        self.expected = expected
        self.numbers = {self.name(number): number for number in range(len(kinds))}
        self._made: list[dict[tuple[int, int], Candidate]] = [{} for _ in kinds]

    def told(self, number: int, load: int) -> None:
        """Take in a report."""
        kind, before, slots = self.kind_numbers[number], self.loads[number], self.slots[number]
        self.loads[number] = load
        if before < slots:
            numbers = self.with_room[kind, before]
            del numbers[bisect_left(numbers, number)]
        if load < slots:
            insort(self.with_room.setdefault((kind, load), []), number)

    def candidate(self, number: int, load: int, limit: int) -> Candidate:
        """An instance with so many jobs, which takes ``limit`` of them before they wait here."""
        made = self._made[number].get((load, limit))
        if made is None:
            kind = self.kinds[number]
            made = self._made[number][load, limit] = Candidate(
                name=self.name(number),
                model=_MODEL,
                vocabulary=_VOCABULARY,
                ready=True,
                limit=limit,
                load=load,
                step=kind.under(load, self.expected.mean),
                slots=limit,
                max_running=kind.slots,
            )
        return made

    @staticmethod
    def name(number: int) -> str:
        """The instance's address. Addresses have the order of their numbers."""
        return f"instance-{number:06}:8001"


@dataclass(frozen=True, slots=True)
class Hands:
    """What a member can do."""

    send: Callable[["SimMember", FleetRequest, int], None]
    refuse: Callable[[FleetRequest], None]


@dataclass(frozen=True, slots=True)
class Post:
    """A member's place in the fleet: the numbers of its instances, None for all, and the queue from
    which it takes requests."""

    number: int
    sees: Sequence[int] | None
    queue: TaskQueue[FleetRequest]
    servers: float = 0.0
    """How many instances' slots are for that queue; 0 where the member's shares say it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What ranks are made of, as of the last plan of all that waits."""

    at: float
    wait_ms: float
    costs: Costs
    least_s: float


class SimMember:
    """One orchestrator of many."""

    def __init__(
        self, post: Post, reports: Reports, sharing: Sharing, hands: Hands, rng: random.Random
    ) -> None:
        self.number = post.number
        self.sees = post.sees
        self.queue = post.queue
        self.own: dict[int, int] = {}
        """Jobs that it has there, by instance."""
        self.news: dict[int, int] = {}
        """Jobs sent less jobs that came back, since the instance's last report."""
        self.shares = [1] * len(reports.kinds)
        """Share of each instance's slots that the member has, in jobs."""
        self._servers = post.servers
        self._reports = reports
        self._sharing = sharing
        self._hands = hands
        self._rng = rng
        self._kinds = {reports.kinds[each] for each in self.seen}
        self.planned = self._plan_at(0.0)

    @property
    def seen(self) -> Sequence[int]:
        """Numbers of the instances that it is in front of."""
        return range(len(self._reports.kinds)) if self.sees is None else self.sees

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def arrive(self, request: FleetRequest, now: float) -> None:
        """Take a request: it starts at once, waits, or is refused."""
        self._plan(request, now)
        if self.queue.full and not self._able():
            leaves = self.queue.giving_way(request)
            if leaves is None:
                self._hands.refuse(request)
                return
            self.queue.remove(leaves)
            self._hands.refuse(leaves)
        self.queue.push(request)
        self.pump(now)

    def came_back(self, number: int, now: float) -> None:
        """A job is over on an instance: its slot may be filled."""
        self.own[number] -= 1
        if not self.own[number]:
            del self.own[number]
        self._note(number, -1)
        self.pump(now)

    def replan(self, now: float) -> None:
        """Rank all that waits anew (``dispatch.replan``)."""
        self.planned = self._plan_at(now)
        waiting = self.queue.tasks()
        for request in waiting:
            self._plan(request, now)
        self.queue.reorder(waiting)
        self.pump(now)

    def pump(self, now: float) -> None:
        """Send what can start."""
        queue = self.queue
        for request in queue.expired(now):
            self._hands.refuse(request)
        while queue and (able := self._able()):
            request = next(queue.leaving())
            chosen = self._choose(request, able)
            queue.take(request)
            self.own[chosen] = self.own.get(chosen, 0) + 1
            self._note(chosen, 1)
            self._hands.send(self, request, chosen)

    # ── the choice ───────────────────────────────────────────────────────────────────────────

    def has_room_at(self, number: int) -> bool:
        """Whether an instance would take one more job, as far as is known here."""
        load = self._reports.loads[number] + self.news.get(number, 0)
        if load >= self._reports.slots[number]:
            return False
        return not self._sharing.has_shares or self.own.get(number, 0) < self.shares[number]

    def _able(self) -> list[int]:
        """Numbers of instances with room, among which the choice is. Of those that look the same,
        and differ by their addresses only, the first stands for all."""
        if self._sharing.choices:
            return self._drawn()
        reports, news = self._reports, self.news
        if self.sees is None and not self._sharing.has_shares:
            found = [number for number in news if self.has_room_at(number)]
            for alike in reports.with_room.values():
                found += islice((number for number in alike if number not in news), 1)
            return found
        loads, kinds, shares = reports.loads, reports.kind_numbers, self.shares
        sent, own = news.get, self.own.get
        room = [number for number in self.seen if self.has_room_at(number)]
        first = {
            (kinds[at], loads[at] + sent(at, 0), shares[at] - own(at, 0)): at
            for at in reversed(room)
        }
        return list(first.values())

    def _drawn(self) -> list[int]:
        """Numbers of so many instances with room, at random, as there are to be ``choices``."""
        if not self.news and not any(self._reports.with_room.values()):
            return []
        rng, choices, seen = self._rng, self._sharing.choices, self.seen
        found: set[int] = set()
        for _ in range(_DRAWS * choices):
            number = seen[int(rng.random() * len(seen))]
            if self.has_room_at(number):
                found.add(number)
                if len(found) == choices:
                    return list(found)
        room = [number for number in seen if self.has_room_at(number)]
        return rng.sample(room, min(choices, len(room)))

    def _choose(self, request: FleetRequest, able: list[int]) -> int:
        demand = Demand(_NEEDS, request.prompt_tokens, self._reports.expected.usual)
        chosen = place(demand, [self._candidate(number) for number in able])
        assert chosen is not None, "all of them have room"
        return self._reports.numbers[chosen.name]

    def _candidate(self, number: int) -> Candidate:
        """An instance as it looks from here (as ``Instance.candidate``)."""
        reports = self._reports
        load, limit = reports.loads[number] + self.news.get(number, 0), reports.slots[number]
        if self._sharing.has_shares:
            limit = min(limit, load - self.own.get(number, 0) + self.shares[number])
        return reports.candidate(number, load, limit)

    def _note(self, number: int, change: int) -> None:
        if self._sharing.is_omniscient:
            self._reports.told(number, self._reports.loads[number] + change)
            return
        count = self.news.get(number, 0) + change
        if count:
            self.news[number] = count
        else:
            self.news.pop(number, None)

    # ── ranks ────────────────────────────────────────────────────────────────────────────────

    def _plan_at(self, now: float) -> Planned:
        """How busy the instances are, and how long a request waits (``Forecaster``)."""
        loads, seen = self._reports.loads, self.seen
        rows = 1 + math.ceil(sum([loads[number] for number in seen]) / len(seen))
        fastest = min(self._kinds, key=lambda kind: kind.step_s(min(rows, kind.slots)))
        rows = min(rows, fastest.slots)
        token_ms = 1000 * fastest.step_s(rows)
        waiting_ms = sum(one.work_ms for one in self.queue.tasks() if not one.is_background)
        servers = self._servers or len(seen) * self._part
        return Planned(
            at=now,
            wait_ms=max(MIN_WAIT_MS, WAIT_PER_DRAIN * waiting_ms / servers),
            costs=Costs(1000 * fastest.cost.prompt_token_s, token_ms, token_ms / rows),
            least_s=MIN_SHARE * fastest.step_s(1),
        )

    @property
    def _part(self) -> float:
        """The part of its instances' slots that is this member's (``Capacity.part``)."""
        slots, shares = self._reports.slots, self.shares
        of = [(min(shares[number], slots[number]), slots[number]) for number in self.seen]
        return sum(own for own, _ in of) / sum(all_slots for _, all_slots in of)

    def _plan(self, request: FleetRequest, now: float) -> None:
        """Set what the queue orders by (``Forecaster.plan``)."""
        planned, due = self.planned, Due(request.deadline.left_ms(now))
        lengths = self._reports.expected.lengths
        found = urgency(lengths, request.prompt_tokens, due, planned.costs, planned.wait_ms)
        request.work_ms = found.work_ms
        request.is_background = found.chance < BACKGROUND_CHANCE
        waited = 1000 * (now - planned.at) / planned.wait_ms
        request.rank = waited - found.log_urgency if found.chance else request.deadline.at
        request.drop_at = request.deadline.at - planned.least_s
