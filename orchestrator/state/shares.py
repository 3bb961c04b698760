"""Each orchestrator's share of an instance's slots, so that no two count on the same free one. With
each renewal of its lease a member publishes its jobs on each instance, with those that it would
send there now, and reads the others'. All divide an instance's slots by the same rule: demanded
slots in proportion, so that a request has the same chance at each member, and the rest in equal
parts, so that an idle member can start at once. A burst at one member waits for a renewal to get
more. Batch work and hopeless work demand nothing while they wait.

Members see an instance with a delay, so many would send to the same free slot. In a large fleet
each instance therefore belongs to a few members, found by rendezvous hashing (Thaler and
Ravishankar, 1998), so that few change when one comes or goes. The others send there only what can
go nowhere else.

Demands are in the store by instance, and a member asks for those of its own instances alone. With
*I* instances, each for *f* of *M* members, all demands together take about

    4/s · I · f · (110 + 15 · f) bytes

to and from the store, 2.7 MB/s for 1,000 instances and 100 members (f = 4); and the list of live
members takes 4/s · M² · 24 bytes, 1 MB/s.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import nsmallest
from typing import Any

import msgspec

from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state import scripts
from orchestrator.state.members import Members
from orchestrator.state.tasks import SharedTasks
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task

INSTANCES_EACH, MEMBERS_EACH = 40, 4
"""Numbers to which a large fleet is divided: an orchestrator has at least so many instances of a
model, and an instance is for at least so many orchestrators. In a simulation (``perf/sim/fleet`` of
commit 108c2fb0) half as many of both kept about as many deadlines, more of both fewer."""
INSTANCES_AT_ONCE = 128
"""Most instances per command to the store, so that none delays the others for long."""
KEEP_MS = 60_000
"""How long the store keeps demands on an instance without updates."""
_SAMPLE = 8
_NAMES_KEPT = 2**14
_MIXER, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
"""An odd number, which takes numbers of 64 bits to others, one to one (Knuth, *The Art of Computer
Programming*, 6.4)."""


def front_of(
    address: str,
    tags: Collection[str],
    instances: int,
    each: int = INSTANCES_EACH,
    least: int = MEMBERS_EACH,
) -> Collection[str]:
    """Members, of ``tags``, that an instance is for, where so many instances serve its model: so
    many that each member has about ``each`` instances, and no fewer than ``least``."""
    most = max(least, math.ceil(each * len(tags) / instances))
    if len(tags) <= most:
        return tags
    own = _number_of(address)
    return nsmallest(most, tags, key=lambda tag: (own ^ _number_of(tag)) * _MIXER & _MASK)


def sample_of(addresses: Iterable[str]) -> list[int]:
    """Numbers that stand for some of these instances. Sets that have much in common have some of
    these in common, too, and all of them that are equal (min-wise hashing: Broder, 1997)."""
    return nsmallest(_SAMPLE, (_number_of(address) >> 32 for address in addresses))


@lru_cache(_NAMES_KEPT)
def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def shares_of(slots: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Divide ``slots`` among members by what each asks for. The shares add up to ``slots``, except
    that each has at least one."""
    given = dict.fromkeys(sorted(demands), 0)
    asked = sum(demands.values())
    for tag in given:
        given[tag] = demands[tag] * slots // max(slots, asked)
    left = slots - sum(given.values())
    if asked > slots:  # to the largest remainders
        for tag in sorted(given, key=lambda tag: -(demands[tag] * slots % asked))[:left]:
            given[tag] += 1
    else:
        for at, tag in enumerate(given):
            given[tag] += left // len(given) + (at < left % len(given))
    return {tag: max(1, count) for tag, count in given.items()}


class SlotShares:
    """Holds each instance to this orchestrator's share of its slots."""

    def __init__(
        self, members: Members, tasks: SharedTasks, registry: Registry, queue: TaskQueue[Task]
    ) -> None:
        self._members = members
        self._tag = tasks.tag
        self._names = tasks.names
        self._registry = registry
        self._queue = queue
        self._told: dict[str, dict[str, int]] = {}
        """Demands by address and tag, as last read."""
        self._asked: list[list[tuple[str, int | str]]] = []
        """Addresses and own demands (empty: none) of the running renewal, by command."""
        self._written: set[str] = set()
        """Addresses of instances for which the store may have a demand from here."""
        self._known: tuple[set[str], dict[str, set[str]]] = set(), {}
        """Members and each model's instances, as of the last time that they changed."""
        self._fronts: dict[str, Collection[str]] = {}
        """Members that an instance is for, by address, of those that are for this orchestrator."""
        members.describe = self._sample
        members.parts.append(self)
        members.on_seen.append(self._divide)

    # ── demands ──────────────────────────────────────────────────────────────────────────────

    def _sample(self) -> list[int]:
        return sample_of(one.address for one in self._registry if one.card is not None)

    def ask(self, pipe: Any) -> int:
        """Tell of this orchestrator's demands, and ask for the others' on the same instances."""
        demands: dict[str, int | str] = {**self._demands()}
        demands |= dict.fromkeys(self._written - demands.keys(), "")
        self._written.update(demands)
        told = list(demands.items())
        starts = range(0, len(told), INSTANCES_AT_ONCE)
        self._asked = [told[start : start + INSTANCES_AT_ONCE] for start in starts]
        for part in self._asked:
            keys = [self._names.demands_of(address) for address, _ in part]
            facts = (self._tag, self._names.alive(""), KEEP_MS, *(demand for _, demand in part))
            pipe.eval(scripts.DEMANDS, len(keys), *keys, *facts)
        return len(self._asked)

    def receive(self, answers: Sequence[Any]) -> None:
        """Take in the others' demands. If the store refuses an instance's, the earlier ones
        stay."""
        for part, answer in zip(self._asked, answers, strict=True):
            if isinstance(answer, Exception):
                continue
            here = [address for address, demand in part if demand != ""]
            gone = [address for address, demand in part if demand == ""]
            told = msgspec.json.decode(answer, type=list[dict[str, int]]) if here else []
            self._told.update(zip(here, told, strict=True))
            for address in gone:
                self._told.pop(address, None)
            self._written.difference_update(gone)

    def _demands(self) -> dict[str, int]:
        """Jobs that this orchestrator has on each instance, or would send there now; without
        others' instances that have none of its jobs."""
        queued = Counter(
            task.model
            for task in self._queue.tasks()
            if task.priority is Priority.INTERACTIVE and not task.is_background
        )
        demands = {}
        for one in self._registry:
            jobs = one.lane_load - one.concurrency.paused
            if one.card is not None and (one.is_ours or jobs):
                demands[one.address] = jobs + queued[one.card.model] * one.is_ours
        return demands

    # ── what follows from it ─────────────────────────────────────────────────────────────────

    def _divide(self) -> None:
        alive = {tag for tag, seen in self._members.others.items() if seen.is_alive} | {self._tag}
        fronts = self._find_fronts(alive)
        changed = moved = False
        for instance in self._registry:
            front, share = fronts.get(instance.address), None
            if len(alive) > 1 and instance.card is not None:
                share = 1
                if front is not None:
                    # An owner without a report demands nothing yet. Others count only with jobs
                    # there.
                    demands = dict.fromkeys((*front, self._tag), 0)
                    told = self._told.get(instance.address, {})
                    demands |= {tag: count for tag, count in told.items() if count and tag in alive}
                    share = shares_of(instance.concurrency.slots, demands)[self._tag]
            is_ours = front is not None or instance.card is None
            if instance.is_ours is not is_ours:
                instance.is_ours, moved = is_ours, True
            if instance.share != share:
                instance.share, changed = share, True
        if changed or moved:
            self._registry.changed(topology=moved)

    def _find_fronts(self, tags: set[str]) -> Mapping[str, Collection[str]]:
        """The members, of those with such tags, that each instance is for which is for this one,
        too: all instances of a model of which none is."""
        by_model: defaultdict[str, set[str]] = defaultdict(set)
        for one in self._registry:
            if one.card is not None:
                by_model[one.card.model].add(one.address)
        if (tags, by_model) != self._known:
            self._known = tags, by_model
            self._fronts = {}
            for addresses in by_model.values():
                fronts = {each: front_of(each, tags, len(addresses)) for each in addresses}
                ours = {each: front for each, front in fronts.items() if self._tag in front}
                self._fronts.update(ours or fronts)
        return self._fronts
