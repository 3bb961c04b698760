"""Slots are divided by what members ask for, and never given twice."""

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.instances.instance import Instance
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state.connection import Names
from orchestrator.state.members import Member, Members, SeenMember
from orchestrator.state.shares import SlotShares, shares_of
from tests.support.cases import for_each

SLOTS = 8


@for_each(
    ("slots", "demands", "shares"),
    [
        (8, {"a": 0, "b": 0}, {"a": 4, "b": 4}),
        (8, {"a": 100, "b": 0}, {"a": 8, "b": 1}),
        (8, {"a": 100, "b": 2}, {"a": 8, "b": 1}),
        (8, {"a": 30, "b": 10}, {"a": 6, "b": 2}),
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
    whole = max(slots, sum(demands.values()))
    assert all(shares[tag] >= count * slots // whole for tag, count in demands.items())
    assert shares == shares_of(slots, dict(reversed(demands.items())))


def tags_of(count: int) -> list[str]:
    return [f"{7 * number:08x}" for number in range(count)]


def addresses_of(count: int) -> list[str]:
    return [f"triton-{number}.triton:8001" for number in range(count)]


class Store:
    """What ``scripts.DEMANDS`` does at a store, among members that are all alive."""

    def __init__(self) -> None:
        self.demands: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.answers: list[bytes] = []
        """Answers of the renewal under way."""

    def eval(self, script: str, count: int, *words: str | int) -> None:
        keys, (tag, _, _, *told) = words[:count], words[count:]
        found = []
        for key, demand in zip(keys, told, strict=True):
            of = self.demands[str(key)]
            if demand == "":
                of.pop(str(tag), None)
            else:
                of[str(tag)] = int(demand)
                found.append(of)
        self.answers.append(msgspec.json.encode(found))

    def of(self, address: str) -> dict[str, int]:
        return self.demands[Names("t").demands_of(address)]


class Fleet:
    """Members in front of the same instances."""

    def __init__(self, members: int, instances: int, models: int = 1) -> None:
        self.store = Store()
        self.members: dict[str, Any] = {}
        self.registries: dict[str, Registry] = {}
        for tag in tags_of(members):
            one = SimpleNamespace(tag=tag, names=Names("t"), others={}, on_seen=[], parts=[])
            self.members[tag], self.registries[tag] = one, Registry(instances, models)
            SlotShares(cast(Members, one), cast(Any, self.registries[tag]), TaskQueue(-1))

    def renew(self) -> None:
        """Renew the lease of one member after the other."""
        seen = {tag: SeenMember(Member("", ""), True) for tag in self.members}
        for tag, one in self.members.items():
            one.others = {other: seen[other] for other in seen if other != tag}
            self.store.answers.clear()
            (part,) = one.parts
            assert part.ask(self.store) == len(self.store.answers)
            part.receive(self.store.answers)
            for call in one.on_seen:
                call()

    def at(self, number: int) -> list[Instance]:
        """An instance as each of the members has it."""
        return [registry.instances[number] for registry in self.registries.values()]


class Registry:
    """Instances without lanes."""

    def __init__(self, instances: int, models: int) -> None:
        self.changes: list[bool] = []
        self.instances = []
        for number, address in enumerate(addresses_of(instances)):
            one = Instance(address)
            card = SimpleNamespace(model=f"model-{number % models}")
            one.encoder = SimpleNamespace(card=card)  # type: ignore[assignment]
            one.concurrency.set_max_running(SLOTS)
            self.instances.append(one)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances)

    def changed(self, *, topology: bool = True) -> None:
        self.changes.append(topology)


def give_jobs(instance: Instance, count: int) -> None:
    lane: Any = SimpleNamespace(load=count)
    instance.lanes[:] = [lane]


def test_or18_however_many_members_there_are_shares_add_up_to_the_slots() -> None:
    fleet = Fleet(5, 200)
    for _ in range(2):
        fleet.renew()
    for registry in fleet.registries.values():
        assert registry.changes == [False]
    for number in range(200):
        give_jobs(fleet.at(number)[0], number % SLOTS)
        give_jobs(fleet.at(number)[1], 1)
    for _ in range(2):
        fleet.renew()
    for number in range(200):
        shares = [one.share or 0 for one in fleet.at(number)]
        assert min(shares) >= 1 and SLOTS <= sum(shares) < SLOTS + 5
        assert shares[0] >= number % SLOTS


def test_or18_what_is_demanded_no_more_is_taken_back() -> None:
    fleet = Fleet(3, 1)
    fleet.renew()
    (tag, registry), *_ = fleet.registries.items()
    (one,) = registry
    give_jobs(one, 2)
    fleet.renew()
    assert fleet.store.of(one.address)[tag] == 2
    registry.instances.clear()
    fleet.renew()
    assert tag not in fleet.store.of(one.address)
