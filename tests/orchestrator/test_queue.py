"""The queue as a state machine against a plain list: order, bound, expiry, exact under removal."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from orchestrator.deadline import Deadline
from orchestrator.queue import TaskQueue


@dataclass(eq=False)
class Item:
    id: str
    deadline: Deadline
    order: int


class QueueMachine(RuleBasedStateMachine):
    """DL-8's simple form, OR-4: earliest deadline first, first come among equals."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: TaskQueue[Item] = TaskQueue(bound=8)
        self.model: list[Item] = []
        self.now = 0.0
        self.made = 0

    items = Bundle("items")

    @rule(target=items, budget=st.integers(0, 5))
    def push(self, budget: int) -> Item:
        item = Item(str(self.made), Deadline(self.now + budget, 0), self.made)
        self.made += 1
        if self.queue.full:
            assert len(self.model) >= 8
        else:
            self.queue.push(item)
            self.model.append(item)
            self.model.sort(key=lambda i: (i.deadline.at, i.order))
        return item

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

    @rule(take=st.integers(0, 7))
    def dispatch_some(self, take: int) -> None:
        """As the dispatcher does it: take some out while walking."""
        seen = []
        for index, item in enumerate(self.queue):
            seen.append(item)
            if index % 2 == 0 and take:
                take -= 1
                self.queue.remove(item)
        assert seen == self.model
        self.model = list(self.queue)

    @rule(step=st.integers(0, 3))
    def pass_time(self, step: int) -> None:
        self.now += step
        expired = self.queue.expired(self.now)
        assert expired == [item for item in self.model if item.deadline.at <= self.now]
        self.model = [item for item in self.model if item.deadline.at > self.now]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.queue.check_integrity()
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model) <= 8
        assert [self.queue.position(item) for item in self.model] == list(range(len(self.model)))


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


@pytest.mark.parametrize(("bound", "full"), [(-1, False), (0, True), (1, False)])
def test_bounds(bound: int, full: bool) -> None:
    queue: TaskQueue[Item] = TaskQueue(bound)
    assert queue.full is full
