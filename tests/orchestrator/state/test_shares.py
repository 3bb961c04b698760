"""Slots are divided by what members ask for, and never given twice."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.state import shares
from orchestrator.state.connection import Names
from orchestrator.state.shares import shares_of
from tests.orchestrator.conftest import MakeWorker
from tests.orchestrator.state.conftest import Sharing, state_of
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker


@for_each(
    ("slots", "demands", "divided"),
    [
        (8, {"a": 0, "b": 0}, {"a": 4, "b": 4}),
        (8, {"a": 100, "b": 0}, {"a": 8, "b": 1}),
        (8, {"a": 100, "b": 2}, {"a": 8, "b": 1}),
        (8, {"a": 30, "b": 10}, {"a": 6, "b": 2}),
        (8, {"a": 3, "b": 1}, {"a": 5, "b": 3}),
        (8, {"a": 9, "b": 9, "c": 9}, {"a": 3, "b": 3, "c": 2}),
    ],
)
def test_shares(slots: int, demands: dict[str, int], divided: dict[str, int]) -> None:
    assert shares_of(slots, demands) == divided


@given(
    st.integers(1, 300),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 500), min_size=1),
)
def test_no_slot_is_given_twice_and_none_is_kept_back(slots: int, demands: dict[str, int]) -> None:
    given_to = shares_of(slots, demands)
    assert given_to.keys() == demands.keys() and min(given_to.values()) >= 1
    assert slots <= sum(given_to.values()) < slots + len(demands)
    whole = max(slots, sum(demands.values()))
    assert all(given_to[tag] >= count * slots // whole for tag, count in demands.items())
    assert given_to == shares_of(slots, dict(reversed(demands.items())))


async def test_or18_demands_are_exchanged_in_parts_and_taken_back(
    sharing: Sharing, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of however many instances: their slots are divided, and one that has left is demanded by
    nobody."""
    monkeypatch.setattr(shares, "INSTANCES_AT_ONCE", 1)
    gone, stays = await make_worker(), await make_worker()
    one, two = await sharing.members(gone, stays)
    registries = [service.orchestrator.registry for service in (one, two)]
    for worker in (gone, stays):
        here, there = (registry.instances[worker.address] for registry in registries)
        slots = here.concurrency.slots
        await one.until(lambda: [here.share, there.share] == [slots // 2] * 2)  # noqa: B023
    async with sharing.store.client() as client:

        async def until_demanded(worker: FakeWorker, is_demanded: bool = True) -> None:
            name, mine = Names("tidegate").demands_of(worker.address), state_of(one).tag.encode()
            while (mine in await client.hgetall(name)) is not is_demanded:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        await until_demanded(gone)
        await registries[0].remove(gone.address)
        await until_demanded(gone, False)
        await until_demanded(stays)
