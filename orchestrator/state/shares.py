"""Each orchestrator's share of an instance's slots, so that no two count on the same free slot.
With each lease renewal, a member publishes its demand on each instance: its jobs there, and the
jobs that it would send there now. It also reads the others' demands. All members use the same rule.
They divide demanded slots in proportion, so that a request has the same chance at each member. They
divide the rest equally, so that an idle member can start at once. A burst at one member waits for a
renewal to get more slots. Waiting batch work and hopeless work demand nothing.

The store has demands by instance. *I* instances and *M* members cause about
``4/s · I · M · (110 + 15 · M)`` bytes of traffic in total."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state import scripts
from orchestrator.state.members import Members
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task

INSTANCES_AT_ONCE = 128
"""Most instances per command to the store, so that no command delays others for long."""
KEEP_MS = 60_000
"""Time in ms that the store keeps demands on an instance without updates."""


def shares_of(slots: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Divide ``slots`` among members by their demands. The shares add up to ``slots``, except that
    each member has at least one."""
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
    """Limits this orchestrator to its share of each instance's slots."""

    def __init__(self, members: Members, registry: Registry, queue: TaskQueue[Task]) -> None:
        self._members = members
        self._tag = members.tag
        self._names = members.names
        self._registry = registry
        self._queue = queue
        self._told: dict[str, dict[str, int]] = {}
        self._asked: list[list[tuple[str, int | str]]] = []
        """Addresses and own demands (empty: none) in the running renewal, by command."""
        self._written: set[str] = set()
        """Addresses of instances for which the store may have this orchestrator's demand."""
        members.parts.append(self)
        members.on_seen.append(self._divide)

    def ask(self, pipe: Any) -> int:
        """Publish this orchestrator's demands, and read the others' demands on these instances."""
        demands: dict[str, int | str] = {**self._demands()}
        demands |= dict.fromkeys(self._written - demands.keys(), "")
        self._written.update(demands)
        told = list(demands.items())
        starts = range(0, len(told), INSTANCES_AT_ONCE)
        self._asked = [told[start : start + INSTANCES_AT_ONCE] for start in starts]
        for part in self._asked:
            keys = [self._names.demands_of(address) for address, _ in part]
            facts = (
                self._tag,
                self._names.alive(""),
                KEEP_MS,
                *(demand for _, demand in part),
            )
            pipe.eval(scripts.DEMANDS, len(keys), *keys, *facts)
        return len(self._asked)

    def receive(self, answers: Sequence[Any]) -> None:
        """Process the others' demands. If the store refuses an instance's demands, the previous
        ones stay."""
        for part, answer in zip(self._asked, answers, strict=True):
            if isinstance(answer, Exception):
                continue
            told = iter(msgspec.json.decode(answer))  # an empty list is an object in Lua's JSON
            for address, demand in part:
                if demand != "":
                    self._told[address] = next(told)
                else:
                    self._told.pop(address, None)
                    self._written.discard(address)

    def _demands(self) -> dict[str, int]:
        """Jobs of this orchestrator on each instance, including those that it would send now."""
        queued = Counter(
            task.model
            for task in self._queue.tasks()
            if task.priority is Priority.INTERACTIVE and not task.is_background
        )
        return {
            one.address: one.lane_load - one.concurrency.paused + queued[one.card.model]
            for one in self._registry
            if one.card is not None
        }

    def _divide(self) -> None:
        alive = {tag for tag, seen in self._members.others.items() if seen.is_alive} | {self._tag}
        changed = False
        for instance in self._registry:
            share = None
            if len(alive) > 1 and instance.card is not None:
                # An instance without a report gets no demand yet.
                told = self._told.get(instance.address, {})
                demands = {tag: told.get(tag, 0) for tag in alive}
                share = shares_of(instance.concurrency.slots, demands)[self._tag]
            if instance.share != share:
                instance.share, changed = share, True
        if changed:
            self._registry.changed(topology=False)
