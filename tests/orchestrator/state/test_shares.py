"""Slots are divided by what members ask for, and never given twice."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.instances.instance import Instance
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state.members import Member, Seen
from orchestrator.state.shares import INSTANCES_EACH, MEMBERS_EACH, SlotShares, front_of, shares_of
from orchestrator.tasks.task import Task

SLOTS = 8


@pytest.mark.parametrize(
    ("slots", "demands", "shares"),
    [
        (8, {"a": 0, "b": 0}, {"a": 4, "b": 4}),
        (8, {"a": 100, "b": 0}, {"a": 8, "b": 1}),
        (8, {"a": 100, "b": 2}, {"a": 6, "b": 2}),
        (8, {"a": 3, "b": 1}, {"a": 5, "b": 3}),
        (8, {"a": 9, "b": 9, "c": 9}, {"a": 3, "b": 3, "c": 2}),
    ],
)
def test_shares(slots: int, demands: dict[str, int], shares: dict[str, int]) -> None:
    assert shares_of(slots, demands) == shares


@given(
    st.integers(1, 300),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 500), min_size=1),
)
def test_no_slot_is_given_twice_and_none_is_kept_back(slots: int, demands: dict[str, int]) -> None:
    shares = shares_of(slots, demands)
    assert shares.keys() == demands.keys() and min(shares.values()) >= 1
    assert slots <= sum(shares.values()) < slots + len(demands)
    fair = slots // len(demands)
    assert all(shares[tag] >= min(count, fair) for tag, count in demands.items())
    assert shares == shares_of(slots, dict(reversed(demands.items())))


# ── large fleets ─────────────────────────────────────────────────────────────────────────────


def tags_of(count: int) -> list[str]:
    return [f"{7 * number:08x}" for number in range(count)]


def addresses_of(count: int) -> list[str]:
    return [f"triton-{number}.triton:8001" for number in range(count)]


@pytest.mark.parametrize(
    ("members", "instances", "each"),
    [
        (MEMBERS_EACH, 1000, MEMBERS_EACH),
        (8, 4, 8),
        (10, INSTANCES_EACH, 10),
        (20, 4 * INSTANCES_EACH, 5),
        (100, 1000, 4),
    ],
)
def test_an_instance_is_for_few_members_and_a_member_has_enough_instances(
    members: int, instances: int, each: int
) -> None:
    tags = tags_of(members)
    fronts = [front_of(address, tags, instances) for address in addresses_of(instances)]
    assert {len(set(front)) for front in fronts} == {each}
    counts = Counter(tag for front in fronts for tag in front)
    mean = instances * each / members
    assert mean >= min(INSTANCES_EACH, instances)
    assert all(mean / 2 <= counts[tag] <= 2 * mean for tag in tags)


def test_few_instances_change_hands_when_a_member_goes() -> None:
    tags = tags_of(100)
    for address in addresses_of(1000):
        before, after = (set(front_of(address, of, 1000)) for of in (tags, tags[1:]))
        assert before - {tags[0]} <= after and len(after - before) == (tags[0] in before)


class Fleet:
    """Members in front of the same instances, and what they tell each other, without a store."""

    def __init__(self, members: int, instances: int, models: int = 1) -> None:
        self.members: dict[str, Any] = {}
        self.registries: dict[str, Any] = {}
        for tag in tags_of(members):
            self.members[tag] = SimpleNamespace(others={}, on_seen=[], describe=dict)
            self.registries[tag] = Registry(instances, models)
            queue: TaskQueue[Task] = TaskQueue(-1)
            SlotShares(self.members[tag], tag, self.registries[tag], queue)

    def renew(self) -> None:
        told = {tag: Member("", "", 0.0, one.describe()) for tag, one in self.members.items()}
        for tag, one in self.members.items():
            one.others = {other: Seen(told[other], True) for other in told if other != tag}
            for call in one.on_seen:
                call()


class Registry:
    """Instances without lanes."""

    def __init__(self, instances: int, models: int) -> None:
        self.changes: list[bool] = []
        self._instances = []
        for number, address in enumerate(addresses_of(instances)):
            one = Instance(address)
            card = SimpleNamespace(model=f"model-{number % models}")
            one.encoder = SimpleNamespace(card=card)  # type: ignore[assignment]
            one.concurrency.set_max_running(SLOTS)
            self._instances.append(one)

    def __iter__(self) -> Any:
        return iter(self._instances)

    def changed(self, *, topology: bool = True) -> None:
        self.changes.append(topology)


def test_or18_however_many_members_there_are_shares_add_up_to_the_slots() -> None:
    """In front of an instance; of the others each may send one job that can go nowhere else."""
    fleet = Fleet(20, 200)
    for _ in range(2):
        fleet.renew()
    for at, address in enumerate(addresses_of(200)):
        ones = [list(registry)[at] for registry in fleet.registries.values()]
        ours = [one for one in ones if one.is_ours]
        assert len(ours) == MEMBERS_EACH, address
        assert sum(one.share for one in ours) == SLOTS
        assert {one.share for one in ones if not one.is_ours} == {1}
    told = [len(one.describe()) for one in fleet.members.values()]
    assert sum(told) == 200 * MEMBERS_EACH
    for registry in fleet.registries.values():
        assert registry.changes == [True, False] or registry.changes == [True]


def test_or18_a_model_of_few_instances_is_for_all_members() -> None:
    fleet = Fleet(20, 20, models=10)
    fleet.renew()
    assert all(one.is_ours for registry in fleet.registries.values() for one in registry)
