"""Instances that are registered for a time: renewed, run out, taken off, bounded (PV-1)."""

import pytest

from orchestrator.errors import InvalidRequest
from orchestrator.instances.discovery import MAX_REGISTRATIONS, RegisteredInstances
from tests.support.cases import for_each
from tests.support.clock import ManualClock


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.ready: set[str] = set()
        self.source = RegisteredInstances(self.clock, self.ready.__contains__)


async def test_it_lasts_for_its_time_from_the_last_renewal() -> None:
    rig = Rig()
    assert rig.source.register("a:1", 10.0)
    rig.clock.advance(9.0)
    assert not rig.source.register("a:1", 10.0)
    assert await rig.source.read() == {"a:1"}
    rig.clock.advance(9.0)
    assert await rig.source.read() == {"a:1"}
    rig.clock.advance(1.0)
    assert await rig.source.read() == frozenset()


async def test_one_that_serves_outlives_its_registration() -> None:
    """A manager that is gone for long is no reason to leave instances that go on."""
    rig = Rig()
    rig.source.register("a:1", 10.0)
    rig.ready.add("a:1")
    rig.clock.advance(3600.0)
    assert await rig.source.read() == {"a:1"}
    rig.ready.clear()
    assert await rig.source.read() == frozenset()


@pytest.mark.parametrize(
    "address",
    [
        *("", "http://a:1", "vllm+http://a:1"),
        pytest.param("\x1b[2J:1", id="drives a terminal, where it is logged"),
        pytest.param("a" * 300 + ":1", id="no host's name"),
        pytest.param(f"vllm+http://a:1?tokenizer=/{'a' * 5000}", id="no folder's name"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^address: "):
        Rig().source.register(address, 10.0)


@for_each("ttl_s", [0.0, 0.9, 3601.0, float("nan"), float("inf")])
def test_a_time_that_makes_no_sense_is_refused(ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^ttl_s: must be from 1 to 3600"):
        Rig().source.register("a:1", ttl_s)


def test_there_can_be_no_more_than_so_many() -> None:
    rig = Rig()
    for port in range(1, MAX_REGISTRATIONS + 1):
        rig.source.register(f"a:{port}", 10.0)
    with pytest.raises(InvalidRequest, match="there can be no more"):
        rig.source.register("b:1", 10.0)
    rig.source.register("a:1", 10.0)  # is one of them
    rig.clock.advance(11.0)
    rig.source.register("b:1", 10.0)


async def test_other_kinds_are_registered_by_url_and_taken_off_by_name() -> None:
    rig = Rig()
    url = "vllm+http://a:1?tokenizer=/models/m"
    assert rig.source.register(url, 10.0)
    assert await rig.source.read() == {url}
    with pytest.raises(InvalidRequest, match="registered with another URL"):
        rig.source.register("vllm+http://a:1?tokenizer=/models/other", 10.0)
    assert rig.source.deregister("vllm@a:1")
    assert await rig.source.read() == frozenset()


def test_nobody_has_files_sent_away_by_a_registration() -> None:
    with pytest.raises(InvalidRequest, match="key_file is only for TIDEGATE_INSTANCES"):
        Rig().source.register("vllm+http://a:1?tokenizer=t&key_file=/etc/shadow", 10.0)
