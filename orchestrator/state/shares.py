"""Each orchestrator's share of an instance's slots, so that no two count on the same free one.

With each renewal of its lease a member says how many jobs it has on each instance or would send
there. All who tell of an instance divide its slots by the same rule: max-min fairness (Bertsekas
and Gallager, *Data Networks*, 6.5.2), and what nobody asks for in equal parts, so that an idle
member can begin at once. A burst at one member has to wait for a renewal until it gets more than
that.

What members see of an instance is a moment old, so that many of them would send to the same free
slot. In a large fleet each instance is therefore for a few members only, found by rendezvous
hashing (Thaler and Ravishankar, 1998), so that few change when one comes or goes. The others send
there what can go nowhere else.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import blake2b
from heapq import nsmallest

from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state.members import Members
from orchestrator.tasks.task import Task

INSTANCES_EACH, MEMBERS_EACH = 40, 4
"""Numbers to which a large fleet is divided: an orchestrator has at least so many instances of a
model, and an instance is for at least so many orchestrators."""
_MAX_SCORES = 2**18


def front_of(
    address: str, tags: Collection[str], instances: int, each: int = INSTANCES_EACH
) -> Collection[str]:
    """Members, of ``tags``, that an instance is for, where so many instances serve its model."""
    most = max(MEMBERS_EACH, math.ceil(each * len(tags) / instances))
    if len(tags) <= most:
        return tags
    return nsmallest(most, tags, key=lambda tag: _score(address, tag))


@lru_cache(_MAX_SCORES)
def _score(address: str, tag: str) -> bytes:
    return blake2b(f"{address} {tag}".encode(), digest_size=8).digest()


def shares_of(slots: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Divide ``slots`` among members by what each asks for. The shares add up to ``slots``, but
    that nobody has less than one."""
    left, given = slots, dict.fromkeys(sorted(demands), 0)
    wanting = {tag for tag, count in demands.items() if count > 0}
    while left > 0 and wanting:
        part = max(1, left // len(wanting))
        for tag in sorted(wanting, key=lambda tag: (demands[tag], tag)):
            more = min(part, demands[tag] - given[tag], left)
            given[tag] += more
            left -= more
        wanting = {tag for tag in wanting if given[tag] < demands[tag]}
    for at, tag in enumerate(given):
        given[tag] += left // len(given) + (at < left % len(given))
    return {tag: max(1, count) for tag, count in given.items()}


class SlotShares:
    """Holds each instance to this orchestrator's share of its slots."""

    def __init__(
        self, members: Members, tag: str, registry: Registry, queue: TaskQueue[Task]
    ) -> None:
        self._members = members
        self._tag = tag
        self._registry = registry
        self._queue = queue
        self._known: tuple[set[str], dict[str, set[str]]] = set(), {}
        """Members and each model's instances, as of the last time that they changed."""
        self._ours: set[str] = set()
        """Addresses of the instances that are for this orchestrator, as of then."""
        members.describe = self._demands
        members.on_seen.append(self._divide)

    def _demands(self) -> dict[str, int]:
        """Jobs that this orchestrator has on each instance, or would send there; instances that are
        not for it and have none of its jobs are left out."""
        queued = Counter(task.model for task in self._queue)
        demands = {}
        for one in self._registry:
            jobs = one.lane_load - one.concurrency.paused
            if one.card is not None and (one.is_ours or jobs):
                demands[one.address] = jobs + queued[one.card.model] * one.is_ours
        return demands

    def _divide(self) -> None:
        others = {
            tag: seen.member.demands for tag, seen in self._members.others.items() if seen.is_alive
        }
        mine, ours = self._demands(), self._find_ours({*others, self._tag})
        changed = moved = False
        for instance in self._registry:
            address, share = instance.address, None
            is_ours = address in ours or instance.card is None
            if others and instance.card is not None:
                share = 1
                if is_ours:
                    told = {tag: each[address] for tag, each in others.items() if address in each}
                    told[self._tag] = mine.get(address, 0)
                    share = shares_of(instance.concurrency.slots, told)[self._tag]
            if instance.is_ours is not is_ours:
                instance.is_ours, moved = is_ours, True
            if instance.share != share:
                instance.share, changed = share, True
        if changed or moved:
            self._registry.changed(topology=moved)

    def _find_ours(self, tags: set[str]) -> set[str]:
        """Addresses of the instances that are for this orchestrator, among members of those tags:
        all instances of a model of which none is."""
        by_model: defaultdict[str, set[str]] = defaultdict(set)
        for one in self._registry:
            if one.card is not None:
                by_model[one.card.model].add(one.address)
        if (tags, by_model) != self._known:
            self._known = tags, by_model
            self._ours = set()
            for addresses in by_model.values():
                self._ours.update(self._in_front_of(addresses, tags) or addresses)
        return self._ours

    def _in_front_of(self, addresses: Collection[str], tags: Collection[str]) -> list[str]:
        """Those of a model's instances that this orchestrator is one of the few for."""
        count = len(addresses)
        return [each for each in addresses if self._tag in front_of(each, tags, count)]
