"""Runs a scene on virtual time, event by event: requests, ends, reports, shares, plans."""

import gc
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state.members import RENEW_S
from orchestrator.state.shares import front_of, shares_of
from perf.sim.fleet.instance import FleetRequest, SteppedInstance
from perf.sim.fleet.member import Expected, Hands, Post, Reports, SimMember
from perf.sim.fleet.scene import FleetScene
from perf.sim.fleet.sharing import Sharing

PLAN_S = 0.25
"""Seconds after which an orchestrator ranks all that waits anew."""


@dataclass(slots=True)
class FleetRun:
    """A run that has ended."""

    scene: FleetScene
    sharing: Sharing
    requests: list[FleetRequest] = field(default_factory=list)
    sent: int = 0
    found_full: int = 0
    """How many requests were sent to an instance without a free slot."""

    @property
    def counted(self) -> list[FleetRequest]:
        """Requests that came when the fleet was warm, and before the last seconds."""
        begin = self.scene.warm_s
        end = begin + self.scene.seconds
        return [request for request in self.requests if begin <= request.arrived < end]


class FleetSource(Protocol):
    """Source of a fleet's requests."""

    @property
    def expected(self) -> Expected:
        """What is known of answers' lengths."""

    def requests(self, scene: FleetScene, seed: int) -> Iterator[FleetRequest]:
        """Requests in order of time; the same for a seed every time."""


class VirtualFleet:
    """Instances and orchestrators of a scene, and what is to happen."""

    def __init__(self, scene: FleetScene, sharing: Sharing, load: FleetSource, seed: int) -> None:
        self.result = FleetRun(scene, sharing)
        self.now = 0.0
        self._scene = scene
        self._sharing = sharing
        self._rng = random.Random(f"{seed} fleet")
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        kinds = scene.fleet
        self.instances = [SteppedInstance(number, kind) for number, kind in enumerate(kinds)]
        self._reports = Reports(kinds, load.expected)
        self._touched: list[set[int]] = [set() for _ in kinds]
        """Members that sent or got something back since an instance's last report."""
        self.members = self._new_members()
        self._fronts = self._members_in_front()
        self._requests = load.requests(scene, seed)
        self._has_more = True
        self._live = 0
        """Requests that have come and have no end yet."""

    def _new_members(self) -> list[SimMember]:
        scene, sharing = self._scene, self._sharing
        count = 1 if sharing.is_omniscient else scene.members
        sees: list[list[int] | None] = [None] * count
        if sharing.subset:
            sees = self._subsets(count)
        hands = Hands(self._send, self._refuse)
        return [
            SimMember(post, self._reports, sharing, hands, random.Random(self._rng.random()))
            for post in self._posts(sees)
        ]

    def _posts(self, sees: list[list[int] | None]) -> Iterator[Post]:
        scene, sharing = self._scene, self._sharing
        whole = scene.bound * scene.members
        if sharing.has_shared_queue:
            queue: TaskQueue[FleetRequest] = TaskQueue(whole)
            for number, seen in enumerate(sees):
                yield Post(number, seen, queue, scene.instances)
            return
        # Without shares each knows at least how many they are.
        servers = 0.0 if sharing.has_shares else scene.instances / len(sees)
        for number, seen in enumerate(sees):
            yield Post(number, seen, TaskQueue(whole // len(sees)), servers)

    def _subsets(self, members: int) -> list[list[int] | None]:
        """Numbers of the instances that each member is bound to; None for all of them."""
        count, each = self._scene.instances, self._sharing.subset
        found: dict[str, list[int]] = {_tag(number): [] for number in range(members)}
        for number in range(count):
            for tag in front_of(self._reports.name(number), found.keys(), count, each, least=1):
                found[tag].append(number)
        return [numbers if 0 < len(numbers) < count else None for numbers in found.values()]

    def _members_in_front(self) -> list[dict[str, SimMember]]:
        """Members in front of each instance, by tag."""
        fronts: list[dict[str, SimMember]] = [{} for _ in self.instances]
        for member in self.members:
            for number in member.seen:
                fronts[number][_tag(member.number)] = member
        return fronts

    # ── time ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> FleetRun:
        """Run until every request has its end."""
        self._arrive_next()
        if not self._sharing.is_omniscient:
            for instance in self.instances:
                at_s = self._rng.random() * self._scene.stale_s
                self._at(at_s, self._report, instance)
            if self._sharing.has_shares:
                self._at(0.0, self._renew)
        planners = self.members[:1] if self._sharing.has_shared_queue else self.members
        for member in planners:
            self._at(self._rng.random() * PLAN_S, self._replan, member)
        was_enabled = gc.isenabled()
        gc.disable()  # objects in cycles are few, and a run is short
        try:
            while self._events:
                self.now, _, call, given = heappop(self._events)
                call(*given)
        finally:
            if was_enabled:
                gc.enable()
        self.result.found_full = sum(instance.found_full for instance in self.instances)
        return self.result

    def _at(self, at_s: float, call: Callable[..., None], *given: object) -> None:
        heappush(self._events, (at_s, next(self._order), call, given))

    @property
    def _is_done(self) -> bool:
        """Whether nothing comes any more, and nothing is left: what repeats may stop."""
        return not (self._live or self._has_more)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def _arrive_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._has_more = False
        else:
            self._at(request.arrived, self._arrive, request)

    def _arrive(self, request: FleetRequest) -> None:
        self._live += 1
        self.result.requests.append(request)
        member = self.members[request.door % len(self.members)]
        request.member = member.number
        self._at(request.deadline.at, self._deadline_passed, request)
        was_empty = not member.queue
        member.arrive(request, self.now)
        # While others waited already, nobody had room.
        if self._sharing.has_shared_queue and was_empty and member.queue:
            self._pump(self.members)
        self._arrive_next()

    def _send(self, member: SimMember, request: FleetRequest, number: int) -> None:
        request.instance, request.member = number, member.number
        self.result.sent += 1
        self._touched[number].add(member.number)
        if self._sharing.delay_s:
            self._at(self.now + self._sharing.delay_s, self._accept, request)
        else:
            self._accept(request)

    def _accept(self, request: FleetRequest) -> None:
        if not request.is_over:
            instance = self.instances[request.instance]
            instance.accept(request, self.now)
            self._look_later(instance)

    def _look_later(self, instance: SteppedInstance) -> None:
        end = instance.next_end()
        if end < math.inf:
            self._at(end, self._look, instance, instance.version)

    def _look(self, instance: SteppedInstance, version: int) -> None:
        if version != instance.version:
            return
        finished = instance.take_finished(self.now)
        self._look_later(instance)
        for request in finished:
            self._end(request, is_met=self.now <= request.deadline.at)

    def _deadline_passed(self, request: FleetRequest) -> None:
        if request.is_over:
            return
        if request.instance < 0:
            self.members[request.member].queue.remove(request)
            self._end(request)
            return
        request.is_over = True  # before its instance looks for the next to run
        if request.is_there:
            instance = self.instances[request.instance]
            instance.cancel(request, self.now)
            self._look_later(instance)
        self._end(request)

    def _refuse(self, request: FleetRequest) -> None:
        request.is_refused = True
        self._end(request)

    def _end(self, request: FleetRequest, *, is_met: bool = False) -> None:
        request.is_over, request.is_met = True, is_met
        self._live -= 1
        if request.instance >= 0:
            self._touched[request.instance].add(request.member)
            self.members[request.member].came_back(request.instance, self.now)

    # ── what repeats ─────────────────────────────────────────────────────────────────────────

    def _report(self, instance: SteppedInstance) -> None:
        """An instance tells all orchestrators how many requests it has."""
        number = instance.number
        self._reports.told(number, instance.load)
        for each in self._touched[number]:
            self.members[each].news.pop(number, None)
        self._touched[number].clear()
        if instance.load < instance.kind.slots:
            front = self._fronts[number].values()
            self._pump([member for member in front if member.queue and member.has_room_at(number)])
        if not self._is_done:
            self._at(self.now + self._scene.stale_s, self._report, instance)

    def _pump(self, members: list[SimMember]) -> None:
        """Have members send what they have room for, in any order."""
        for member in self._rng.sample(members, len(members)):
            if member.queue:
                member.pump(self.now)

    def _replan(self, member: SimMember) -> None:
        member.replan(self.now)
        if self._sharing.has_shared_queue:
            for other in self.members:
                other.planned = member.planned
        if not self._is_done:
            self._at(self.now + PLAN_S, self._replan, member)

    def _renew(self) -> None:
        """All orchestrators learn what each has and wants, and divide the slots by it."""
        waits = [len(member.queue) - member.queue.background for member in self.members]
        for instance, front in zip(self.instances, self._fronts, strict=True):
            number = instance.number
            demands = {
                tag: member.own.get(number, 0) + waits[member.number]
                for tag, member in front.items()
            }
            for tag, share in shares_of(instance.kind.slots, demands).items():
                front[tag].shares[number] = share
        self._pump(self.members)
        if not self._is_done:
            self._at(self.now + RENEW_S, self._renew)


def _tag(member: int) -> str:
    """What the store calls a member."""
    return f"{member:08x}"
