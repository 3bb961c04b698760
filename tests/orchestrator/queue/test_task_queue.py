"""The queue as a state machine against a plain list: order, shares, bound, expiry, removal."""

import random
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from orchestrator.fair_share import FAIR_LAG_JOBS
from orchestrator.queue.order import DeadlineOrder, FifoOrder, Order
from orchestrator.queue.task_queue import BATCH_EVERY, TaskQueue
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Priority
from tests.support.cases import for_each


@dataclass(eq=False)
class Item:
    id: str
    deadline: Deadline
    rank: float
    order: int = 0
    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    work_ms: float = 100.0
    is_background: bool = False
    paused_on: str = ""
    holds_place: bool = False


def item(name: str, at: float, **changes: object) -> Item:
    """One that ranks by its deadline."""
    made = Item(name, Deadline(at, 0), at)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


class QueueMachine(RuleBasedStateMachine):
    """DL-8, OR-4: one tenant, so that the order is exact: class, background, rank, arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: TaskQueue[Item] = TaskQueue(bound=8)
        self.model: list[Item] = []
        self.now = 0.0
        self.made = 0

    items = Bundle("items")

    def ordered(self) -> list[Item]:
        def place(i: Item) -> tuple[bool, bool, float, int]:
            return i.is_background, i.priority is Priority.BATCH, i.rank, i.order

        return sorted(self.model, key=place)

    @rule(
        target=items,
        budget=st.integers(0, 6),
        rank=st.floats(-100, 100),
        background=st.booleans(),
        priority=st.sampled_from(Priority),
    )
    def push(self, budget: int, rank: float, background: bool, priority: Priority) -> Item:
        deadline = Deadline(self.now + budget, 0)
        new = Item(str(self.made), deadline, rank, self.made, priority)
        new.is_background = background
        self.made += 1
        if self.queue.full:
            assert len(self.model) >= 8
        else:
            self.queue.push(new)
            self.model.append(new)
        return new

    @rule(item=items)
    def remove(self, item: Item) -> None:
        assert self.queue.remove(item) == (item in self.model)
        if item in self.model:
            self.model.remove(item)

    @rule(item=consumes(items))
    def forget(self, item: Item) -> None:
        self.queue.remove(item)
        assert not self.queue.remove(item)
        if item in self.model:
            self.model.remove(item)

    @rule(item=items, rank=st.floats(-100, 100), background=st.booleans(), work=st.floats(1, 1e4))
    def replan(self, item: Item, rank: float, background: bool, work: float) -> None:
        """Predictions change; a task in the background may have a chance again."""
        item.rank, item.is_background, item.work_ms = rank, background, work
        self.queue.reorder([item])

    @rule(take=st.integers(0, 7))
    def dispatch_some(self, take: int) -> None:
        """As the dispatcher does it: take some out while walking. Batch's turn is tested apart."""
        seen = []
        expected = self.ordered()
        for index, item in enumerate(self.queue):
            seen.append(item)
            if index % 2 == 0 and take:
                take -= 1
                self.queue.take(item)
                self.model.remove(item)
        assert seen == expected

    @rule(step=st.integers(0, 3))
    def pass_time(self, step: int) -> None:
        self.now += step
        expired = self.queue.expired(self.now)
        gone = [i for i in self.model if i.deadline.at <= self.now]
        assert sorted(i.order for i in expired) == sorted(i.order for i in gone)
        self.model = [i for i in self.model if i.deadline.at > self.now]

    @rule()
    def oldest_batch(self) -> None:
        batch = [i for i in self.model if i.priority is Priority.BATCH]
        newcomer = item("newcomer", self.now)
        assert self.queue.oldest_batch(newcomer) is min(batch, key=lambda i: i.order, default=None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.queue.check_integrity()
        expected = self.ordered()
        assert list(self.queue) == expected
        assert sorted(i.order for i in self.queue.tasks()) == sorted(i.order for i in expected)
        assert len(self.queue) == len(self.model) <= 8
        assert self.queue.background == sum(i.is_background for i in self.model)
        assert [self.queue.place_of(i) for i in expected] == list(range(len(expected)))
        assert self.queue.first(len(expected) + 1) == expected
        assert self.queue.first(2) == expected[:2]


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestQueue = QueueMachine.TestCase


@for_each(("bound", "full"), [(-1, False), (0, True), (1, False)])
def test_or4_bounds(bound: int, full: bool) -> None:
    queue: TaskQueue[Item] = TaskQueue(bound)
    assert queue.full is full


def test_dl8_rank_counts_not_the_deadline_and_hopeless_work_is_no_most_urgent() -> None:
    """The long one is due later and yet more urgent, until it has no chance any more."""
    queue: TaskQueue[Item] = TaskQueue(-1)
    short = item("short", 10.0, rank=5.0)
    long = item("long", 12.0, rank=2.0)
    for each in (short, long):
        queue.push(each)
    assert list(queue) == [long, short]
    long.is_background = True
    queue.reorder([long])
    assert list(queue) == [short, long]
    assert queue.background == 1
    assert queue.expired(11.0) == [short]
    queue.check_integrity()


def test_dl15_the_background_comes_behind_every_class_and_back_with_a_chance() -> None:
    queue: TaskQueue[Item] = TaskQueue(-1)
    lost, batch, late = (
        item("lost", 10.0, rank=-9.0, is_background=True),
        item("batch", 90.0, priority=Priority.BATCH),
        item("late", 20.0, priority=Priority.BATCH, is_background=True),
    )
    for each in (lost, batch, late):
        queue.push(each)
    assert list(queue) == [batch, lost, late]
    lost.is_background = False
    queue.reorder([lost])
    assert list(queue) == [lost, batch, late]
    assert [queue.place_of(each) for each in (lost, batch, late)] == [0, 1, 2]


class Door:
    """A full queue of eight places, and who comes to it."""

    def __init__(self, *waiting: Item, order: Order | None = None) -> None:
        self.queue: TaskQueue[Item] = TaskQueue(len(waiting), order)
        for each in waiting:
            self.queue.push(each)

    def takes(self, newcomer: Item) -> str | None:
        """Whose place it takes, if anybody's; it has it then."""
        left = self.queue.giving_way(newcomer)
        if left is not None:
            self.queue.remove(left)
            self.queue.push(newcomer)
        self.queue.check_integrity()
        return None if left is None else left.id


BATCH = {"priority": Priority.BATCH}


def several(count: int, name: str, **changes: object) -> list[Item]:
    """Of the tenant with the name's first letter; the last one is the least urgent."""
    return [item(f"{name}{i}", 50.0 + i, tenant=name[0], **changes) for i in range(count)]


def test_or24_tenants_that_come_to_a_full_queue_get_their_shares_and_no_more() -> None:
    door = Door(*several(8, "a"))
    found = [door.takes(new) for new in several(5, "b")]
    assert found == ["a7", "a6", "a5", "a4", None]
    assert door.takes(item("more", 10.0, tenant="a")) is None
    # Of two that hold as much, each gives one up to a third one, down to its share.
    assert [door.takes(new) for new in several(4, "c")] == ["a3", "b3", None, None]


def test_or24_interactive_work_displaces_batch_work_of_its_tenant_and_of_larger_ones() -> None:
    door = Door(*several(4, "a batch", **BATCH), *several(1, "b batch", **BATCH), *several(3, "c"))
    assert door.takes(item("a", 10.0, tenant="a")) == "a batch3"
    (more,) = several(1, "a more batch", **BATCH)
    assert door.takes(more) is None, "batch work displaces none of its own tenant"
    assert door.takes(item("c", 10.0, tenant="c")) is None, "it has as many, less one, as anybody"
    found = [door.takes(item(f"b{i}", 10.0, tenant="b")) for i in range(3)]
    assert found == ["a batch2", "b batch0", None], "the larger tenant's first, then its own"


def test_or24_batch_work_gives_way_first_and_then_what_has_next_to_no_chance() -> None:
    hopeless = several(1, "a hopeless", is_background=True)
    door = Door(*several(3, "a"), *hopeless, *several(1, "a batch", **BATCH))
    found = [door.takes(new) for new in several(3, "b", **BATCH)]
    assert found == ["a batch0", "a hopeless0", None]


def test_or5_nobody_takes_a_place_that_is_held() -> None:
    durable = several(4, "a durable", **BATCH, holds_place=True)
    door = Door(*durable, *several(3, "a begun", holds_place=True))
    assert door.takes(item("new", 10.0, tenant="b")) is None
    assert not door.queue.lets_in(others=True)
    door = Door(*several(2, "a batch", **BATCH), *durable)
    assert door.takes(item("new", 10.0, tenant="b")) == "a batch1"


def test_or24_a_tenant_leaves_places_that_others_could_not_take() -> None:
    queue: TaskQueue[Item] = TaskQueue(8)
    ordinary = several(2, "a usual")
    for each in ordinary:
        queue.push(each)
    held = several(9, "a durable", holds_place=True)
    while not queue.is_at_share(held[0]):
        queue.push(held.pop())
    assert len(queue) == 8 and queue.full
    assert not queue.is_at_share(item("b", 10.0, tenant="b", holds_place=True))
    assert not queue.is_at_share(item("a", 10.0, tenant="a"))
    assert queue.giving_way(item("b", 10.0, tenant="b")) in ordinary


def test_paused_tasks_are_no_places() -> None:
    """They were let in once, and have begun."""
    paused = several(6, "a", paused_on="x", holds_place=True)
    queue: TaskQueue[Item] = TaskQueue(2)
    for each in (*paused, *several(2, "b")):
        queue.push(each)
    queue.check_integrity()
    assert queue.full and queue.new == 2
    gives_way = queue.giving_way(item("new", 10.0, tenant="a"))
    assert gives_way is not None and gives_way.id == "b1"


def test_or13_who_would_be_let_in_to_a_full_queue() -> None:
    interactive = Door(*several(4, "a")).queue
    assert not interactive.lets_in(others=False), "only its own tenant comes, to whom nobody yields"
    assert interactive.lets_in(others=True)
    assert Door(*several(3, "a"), *several(1, "b", **BATCH)).queue.lets_in(others=False)
    one_each = Door(*(item(name, 9.0, tenant=name) for name in "abcd")).queue
    assert not one_each.lets_in(others=True)
    one_each.remove(one_each.tasks()[0])
    assert one_each.lets_in(others=False)


def test_fifo_knows_no_classes_and_no_shares() -> None:
    door = Door(*several(8, "a", **BATCH), order=FifoOrder())
    assert door.takes(item("new", 10.0, tenant="b")) is None
    assert not door.queue.lets_in(others=True)


@for_each("order", [DeadlineOrder(), FifoOrder()])
def test_the_other_orders_are_what_they_are_called(order: Order) -> None:
    rng = random.Random(4)
    queue: TaskQueue[Item] = TaskQueue(-1, order)
    items = [item(str(i), rng.uniform(5, 50), tenant=rng.choice("ab")) for i in range(50)]
    for each in items:
        queue.push(each)
    assert queue.expired(4.0) == []
    if isinstance(order, FifoOrder):
        assert list(queue) == items
        return
    for tenant in "ab":
        at = [i.deadline.at for i in queue if i.tenant == tenant]
        assert at == sorted(at)


def test_dl8_a_flood_of_one_tenant_leaves_the_others_their_share() -> None:
    """A keeps 200 urgent tasks waiting; B and C, with few and relaxed ones, get a third each."""
    queue: TaskQueue[Item] = TaskQueue(-1)
    rng = random.Random(8)
    made = 0
    waiting = dict.fromkeys("abc", 0)
    served = dict.fromkeys("abc", 0.0)
    for _ in range(600):
        for tenant, depth, at in (("a", 200, 10.0), ("b", 3, 1000.0), ("c", 3, 2000.0)):
            while waiting[tenant] < depth:
                made += 1
                service = rng.choice([50.0, 100.0, 300.0])
                queue.push(item(str(made), at + made, tenant=tenant, work_ms=service))
                waiting[tenant] += 1
        first = next(iter(queue))
        queue.take(first)
        waiting[first.tenant] -= 1
        served[first.tenant] += first.work_ms
    queue.check_integrity()
    # The lag bound is some jobs' worth on either side.
    assert max(served.values()) - min(served.values()) <= 2 * (FAIR_LAG_JOBS + 1) * 300


def test_dl8_an_idle_tenant_saves_nothing_up() -> None:
    queue: TaskQueue[Item] = TaskQueue(-1)
    for i in range(100):
        queue.push(item(f"a{i}", 100.0, tenant="a"))
        queue.take(next(iter(queue)))
    for i in range(20):
        queue.push(item(f"a-{i}", 100.0, tenant="a"))
        queue.push(item(f"b-{i}", 200.0, tenant="b"))
    first = []
    for _ in range(20):
        first.append(next(iter(queue)))
        queue.take(first[-1])
    assert 6 <= sum(i.tenant == "a" for i in first) <= 14


def test_dl8_batch_is_never_starved() -> None:
    queue: TaskQueue[Item] = TaskQueue(-1)
    queue.push(item("batch", 1e6, priority=Priority.BATCH))
    taken = []
    for i in range(100):
        queue.push(item(str(i), 10.0))
        first = next(iter(queue))
        taken.append(first.id)
        queue.take(first)
    assert taken.index("batch") == BATCH_EVERY


def test_many_tenants_stay_cheap_to_keep() -> None:
    """One that never comes back is forgotten."""
    queue: TaskQueue[Item] = TaskQueue(-1)
    for i in range(3000):
        queue.push(item(str(i), 10.0 + i, tenant=str(i)))
        if i % 2:
            for each in list(queue):
                queue.take(each)
    shares = queue._shares[Priority.INTERACTIVE]
    assert len(shares._served_ms) <= 1024
