"""Each orchestrator's share of an instance's slots, so that no two count on the same free one.

With each renewal of its lease a member says how many jobs it has on each instance or would send
there. All members divide the slots by the same rule: max-min fairness (Bertsekas and Gallager,
*Data Networks*, 6.5.2), and what nobody asks for in equal parts, so that an idle member can begin
at once. A burst at one member has to wait for a renewal until it gets more than that.
"""

from collections import Counter
from collections.abc import Mapping

from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state.members import Members
from orchestrator.tasks.task import Task


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
        members.describe = self._demands
        members.on_seen.append(self._divide)

    def _demands(self) -> dict[str, int]:
        """Jobs that this orchestrator has on each instance, or would send there."""
        queued = Counter(task.model for task in self._queue)
        return {
            one.address: one.lane_load - one.concurrency.paused + queued[one.card.model]
            for one in self._registry
            if one.card is not None
        }

    def _divide(self) -> None:
        others = {
            tag: seen.member.demands for tag, seen in self._members.others.items() if seen.is_alive
        }
        mine, changed = self._demands(), False
        for instance in self._registry:
            share = None
            if others and instance.card is not None:
                demands = {tag: demand.get(instance.address, 0) for tag, demand in others.items()}
                demands[self._tag] = mine.get(instance.address, 0)
                share = shares_of(instance.concurrency.slots, demands)[self._tag]
            if instance.share != share:
                instance.share, changed = share, True
        if changed:
            self._registry.changed(topology=False)
