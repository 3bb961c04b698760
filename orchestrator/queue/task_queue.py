"""The bounded queue of waiting tasks: fair between tenants, least slack first (DL-8, OR-4).

The order in which tasks leave::

    interactive ─▶ batch ─▶ background
      └─ but every 17th is batch while batch waits

Within a class, eligible tenants are those with at most four jobs' worth of service more than the
least served tenant (virtual time as in start-time fair queueing; Goyal, Vin and Cheng, 1996). Among
their tasks the one with the smallest *rank*, which is its urgency (``prediction.urgency``), leaves
first. Tasks with almost no chance of being in time are *background*: they get only unused slots,
and lose this mark when a plan gives them a chance. The queue removes a task at its deadline.

A task that arrives at a full queue replaces a task that would leave late::

    newcomer is interactive   batch work of its own tenant
    newcomer is of a tenant   any work of the tenant with the most places, batch work first
    with fewer places

So no tenant keeps more than its share of the places while others want theirs, and a single tenant
has all places (longest queue drop; Suter et al., 1999). Tasks that hold their places, such as
durable ones, are never replaced; a tenant has at most three times as many of them as free places.

Each operation takes O(log n) time in tasks and linear time in waiting tenants. Only the search for
a task to replace may look at all tasks that hold their places.

It has no clock and no asyncio tasks: the dispatcher passes the time.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from orchestrator.fair_share import FairShares, is_over_share
from orchestrator.queue.order import (
    BACKGROUND_TIERS,
    BATCH_FIRST,
    BATCH_TIERS,
    INTERACTIVE_TIERS,
    TIERS,
    Order,
    QueuePolicy,
    SlackOrder,
    SortKey,
    Tier,
    TierQueue,
    Waiting,
)
from orchestrator.tasks.job import Priority
from orchestrator.telemetry.metrics import MetricRow

BATCH_EVERY = 16
"""Most interactive tasks that leave in a row while a batch task waits."""
AT_ONCE = 16
"""Maximum number of waiting tasks to examine without a pause, so that no stream is delayed: plans
for all of them take half a millisecond, a closer look takes a millisecond each."""


class Queueable(Waiting, Protocol):
    """The fields of a task that the queue reads, in addition to those of its order.

    They may change while the task waits: then call ``reorder``.
    """

    @property
    def id(self) -> str: ...
    @property
    def work_ms(self) -> float: ...
    @property
    def paused_on(self) -> str:
        """The instance that holds the paused job; empty while the task waits for its start."""

    @property
    def holds_place(self) -> bool:
        """Whether no task may take its place: it was promised, or the task has begun."""


T = TypeVar("T", bound=Queueable)


class _Entry(NamedTuple, Generic[T]):
    task: T
    tier: Tier
    tenant: str
    key: SortKey
    drop: SortKey
    work_ms: float
    is_paused: bool


class TaskQueue(Generic[T]):
    """Waiting tasks in the order in which they will leave."""

    def __init__(
        self,
        bound: int,
        order: Order | None = None,
        policy: QueuePolicy = QueuePolicy.REJECT,
    ) -> None:
        """``bound``: -1 is unbounded, 0 refuses tasks that cannot start at once. ``order`` None is
        ``SlackOrder``.

        ``policy`` tells callers of ``push`` how to handle a full queue.
        """
        self.bound = bound
        self.policy = policy
        self.work_ms = 0.0
        self._order = order or SlackOrder()
        self._tiers = {tier: TierQueue() for tier in TIERS}
        self._shares = {priority: FairShares() for priority in Priority}
        self._entries: dict[str, _Entry[T]] = {}
        self._ids: dict[int, str] = {}
        self._drops: list[SortKey] = []
        self._arrivals = 0
        self._places: dict[str, int] = {}
        """Number of tasks that wait to start, by tenant."""
        self.new = 0
        """Total number of tasks that wait to start."""
        self._since_batch = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task: T) -> bool:
        return task.id in self._entries

    @property
    def full(self) -> bool:
        """Whether the queue holds as many tasks as it may; paused jobs do not count."""
        return self.bound >= 0 and self.new >= self.bound

    @property
    def background(self) -> int:
        return sum(self._tiers[tier].size for tier in BACKGROUND_TIERS)

    # ── in and out ───────────────────────────────────────────────────────────────────────────

    def push(self, task: T) -> None:
        """Add a task. The caller must first check that there is room (``full``)."""
        assert task.id not in self._entries, f"task {task.id} is queued already"
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._add(task, arrival)

    def remove(self, task: T) -> bool:
        """Remove a task without charging its tenant. False if it is not queued."""
        return self._discard(task.id) is not None

    def take(self, task: T) -> None:
        """Remove a task to run it, and charge its tenant's share once."""
        entry = self._discard(task.id)
        assert entry is not None, f"task {task.id} is not queued"
        if entry.is_paused:
            return
        self._shares[task.priority].served(entry.tenant, entry.work_ms)
        if entry.tier in BATCH_TIERS:
            self._since_batch = 0
        elif self._tiers[Tier.BATCH].size:
            self._since_batch += 1

    def expired(self, now: float) -> list[T]:
        """Remove and return all tasks whose deadline has passed."""
        gone = []
        while self._drops and self._drops[0].rank <= now:
            entry = self._discard(self._ids[self._drops[0].arrival])
            assert entry is not None
            gone.append(entry.task)
        return gone

    # ── a full queue ─────────────────────────────────────────────────────────────────────────

    def giving_way(self, newcomer: T) -> T | None:
        """The task that leaves a full queue to make room for ``newcomer``; None if none may."""
        if not self._order.makes_room:
            return None
        places, own = self._places, self._places.get(newcomer.tenant, 0)
        larger = sorted((one for one in places if places[one] > own + 1), key=lambda t: -places[t])
        batch = larger
        if newcomer.priority is Priority.INTERACTIVE:  # its own tenant comes last
            batch = [*larger, newcomer.tenant]
        return self._last(BATCH_TIERS, batch) or self._last(INTERACTIVE_TIERS, larger)

    def is_at_share(self, newcomer: T) -> bool:
        """Whether ``newcomer`` would hold a place beyond its tenant's share (OR-24)."""
        if not newcomer.holds_place or self.bound < 0:
            return False
        own = self._places.get(newcomer.tenant, 0)
        if not is_over_share(own, 1, self.bound - self.new):
            return False
        waiting = (one.task for one in self._entries.values() if not one.is_paused)
        held = [task.tenant for task in waiting if task.holds_place]
        return is_over_share(held.count(newcomer.tenant), 1, self.bound - len(held))

    def oldest_batch(self, newcomer: T) -> T | None:
        """The longest-waiting batch task of tenants with at least as many places as the tenant of
        ``newcomer``, or None. Under ``drop-lru`` it makes room for ``newcomer``."""
        own = self._places.get(newcomer.tenant, 0)
        batch = [
            entry
            for entry in self._entries.values()
            if entry.task.priority is Priority.BATCH
            and not entry.task.holds_place
            and self._places[entry.task.tenant] >= own
        ]
        return min(batch, key=lambda entry: entry.key.arrival).task if batch else None

    def lets_in(self, *, others: bool) -> bool:
        """Whether the queue has a place now for interactive work of a tenant that has waiting tasks
        or, with ``others``, of a tenant that has none."""
        if not self.full:
            return True
        if self._last(BATCH_TIERS, self._places) is not None:
            return True
        several = [tenant for tenant, count in self._places.items() if count > 1]
        return others and self._last(INTERACTIVE_TIERS, several) is not None

    def _last(self, tiers: Sequence[Tier], tenants: Iterable[str]) -> T | None:
        """The last task that does not hold its place, of the first of ``tenants`` with such a task
        in ``tiers``; None if there is none."""
        for tenant in tenants:
            for tier in reversed(tiers):
                for key in reversed(self._tiers[tier].keys.get(tenant, ())):
                    task = self._entries[self._ids[key.arrival]].task
                    if not task.holds_place:
                        return task
        return None

    def reorder(self, tasks: Iterable[T]) -> None:
        """Update the places of ``tasks`` after their predictions changed; skips tasks that left."""
        for task in tasks:
            entry = self._discard(task.id)
            if entry is not None:
                self._add(task, entry.key.arrival)

    def tasks(self) -> list[T]:
        return [entry.task for entry in self._entries.values()]

    # ── order ────────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[T]:
        """Waiting tasks in order. Between steps only the task just yielded may be removed."""
        return self.leaving()

    def leaving(self, *, only_interactive: bool = False) -> Iterator[T]:
        """Waiting tasks in the order in which they leave; with ``only_interactive``, only
        interactive tasks with a chance of being in time."""
        passed: dict[Tier, dict[str, int]] = {tier: {} for tier in TIERS}
        while (chosen := self._choose(passed, only_interactive)) is not None:
            yield chosen.task
            if chosen.task.id in self._entries:
                skipped = passed[chosen.tier]
                skipped[chosen.tenant] = skipped.get(chosen.tenant, 0) + 1

    def first(self, most: int) -> list[T]:
        """The first ``most`` tasks by class and rank, as in ``place_of``."""
        found: list[T] = []
        for flow in self._tiers.values():
            keys = islice(merge(*flow.keys.values()), most - len(found))
            found += [self._entries[self._ids[key.arrival]].task for key in keys]
            if len(found) == most:
                break
        return found

    def place_of(self, task: T) -> int:
        """The number of tasks that leave before ``task`` by class and rank, or would if it arrived
        now. Fair shares between tenants may change this."""
        tier, _, rank = self._order.place_of(task)
        key = SortKey(rank, self._arrivals)
        if (entry := self._entries.get(task.id)) is not None:
            tier, key = entry.tier, entry.key
        earlier = sum(self._tiers[other].size for other in TIERS if other < tier)
        return earlier + self._tiers[tier].before(key)

    @property
    def next_expiry(self) -> float | None:
        """The earliest deadline of all waiting tasks; None if the queue is empty."""
        return self._drops[0].rank if self._drops else None

    def _choose(
        self, passed: dict[Tier, dict[str, int]], only_interactive: bool
    ) -> _Entry[T] | None:
        tiers = BATCH_FIRST if self._since_batch >= BATCH_EVERY else TIERS
        for tier in (Tier.INTERACTIVE,) if only_interactive else tiers:
            heads = self._heads(tier, passed[tier])
            if not heads:
                continue
            batch = tier in BATCH_TIERS
            shares = self._shares[Priority.BATCH if batch else Priority.INTERACTIVE]
            tenant = shares.next_of([tenant for _, tenant in heads])
            key = self._tiers[tier].keys[tenant][passed[tier].get(tenant, 0)]
            return self._entries[self._ids[key.arrival]]
        return None

    def _heads(self, tier: Tier, skipped: dict[str, int]) -> list[tuple[SortKey, str]]:
        """Tenants in the order of their first keys after ``skipped`` keys of each tenant."""
        flow = self._tiers[tier]
        if not skipped:
            return flow.heads
        heads = [head for head in flow.heads if head[1] not in skipped]
        for tenant, count in skipped.items():
            keys = flow.keys.get(tenant, ())
            if len(keys) > count:
                insort(heads, (keys[count], tenant))
        return heads

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _add(self, task: T, arrival: int) -> None:
        tier, tenant, rank = self._order.place_of(task)
        self._shares[task.priority].joined(tenant)
        entry = _Entry(
            task,
            tier,
            tenant,
            SortKey(rank, arrival),
            SortKey(task.deadline.at, arrival),
            task.work_ms,
            bool(task.paused_on),
        )
        if not entry.is_paused:
            self._count(task.tenant, 1)
        self._entries[task.id] = entry
        self._ids[arrival] = task.id
        self._tiers[tier].add(tenant, entry.key)
        insort(self._drops, entry.drop)
        self.work_ms += entry.work_ms

    def _discard(self, task_id: str) -> _Entry[T] | None:
        entry = self._entries.pop(task_id, None)
        if entry is None:
            return None
        if not entry.is_paused:
            self._count(entry.task.tenant, -1)
        del self._ids[entry.key.arrival]
        self._tiers[entry.tier].discard(entry.tenant, entry.key)
        del self._drops[bisect_left(self._drops, entry.drop)]
        self.work_ms -= entry.work_ms
        if not self._entries:
            self.work_ms = 0.0
        return entry

    def _count(self, tenant: str, change: int) -> None:
        self.new += change
        self._places[tenant] = self._places.get(tenant, 0) + change
        if not self._places[tenant]:
            del self._places[tenant]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless all indexes agree."""
        keys = [
            (tier, tenant, key)
            for tier in TIERS
            for tenant, keys in self._tiers[tier].keys.items()
            for key in keys
        ]
        places = Counter(e.task.tenant for e in self._entries.values() if not e.is_paused)
        assert self._places == places and self.new == places.total()
        assert sorted(keys) == sorted((e.tier, e.tenant, e.key) for e in self._entries.values())
        assert self._drops == sorted(entry.drop for entry in self._entries.values())
        assert self._ids == {entry.key.arrival: id for id, entry in self._entries.items()}
        for flow in self._tiers.values():
            assert all(keys and keys == sorted(keys) for keys in flow.keys.values())
            assert flow.heads == sorted((keys[0], tenant) for tenant, keys in flow.keys.items())
            assert flow.size == sum(map(len, flow.keys.values()))
        total_ms = sum(entry.work_ms for entry in self._entries.values())
        assert abs(self.work_ms - total_ms) < 1e-6 * (1 + total_ms)


QUEUE: tuple[MetricRow[TaskQueue[Any]], ...] = (
    MetricRow("gauge", "queue_depth", "tasks", "Waiting tasks", len),
    MetricRow(
        "gauge",
        "queue_background",
        "tasks",
        "Waiting tasks that have almost no chance of being in time",
        lambda queue: queue.background,
    ),
    MetricRow(
        "gauge",
        "queue_work_ms",
        "ms",
        "Expected engine time of all waiting tasks",
        lambda queue: queue.work_ms,
    ),
)
