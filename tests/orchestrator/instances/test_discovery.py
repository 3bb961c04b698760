"""Where addresses come from, and the registry kept in step with them."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.instances import discovery
from orchestrator.instances.addresses import check_address, check_entry
from orchestrator.instances.discovery import (
    DiscoverySync,
    DnsName,
    SourceError,
)
from tests.support.cases import for_each
from tests.support.clock import ManualClock


class FakeSource:
    """Says what a test wants."""

    def __init__(self, name: str = "dns:x:1") -> None:
        self.name = name
        self.answer: frozenset[str] | SourceError = frozenset()

    async def read(self) -> frozenset[str]:
        if isinstance(self.answer, SourceError):
            raise self.answer
        return self.answer


class FakeInstances:
    """What the registry does, without lanes. Every call is kept."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.known: dict[str, float | None] = {}
        self.jobs: dict[str, int] = {}
        self.calls: list[str] = []
        self.serving: set[str] = set()

    def ready(self, address: str) -> bool:
        return address in self.serving

    def addresses(self) -> dict[str, float | None]:
        return dict(self.known)

    def idle(self, address: str) -> bool:
        return not self.jobs.get(address)

    def add(self, address: str) -> None:
        self.calls.append(f"add {address}")
        self.known[address] = None

    def retire(self, address: str) -> None:
        self.calls.append(f"retire {address}")
        self.known[address] = self.clock.now()

    async def remove(self, address: str) -> None:
        self.calls.append(f"remove {address}")
        del self.known[address]
        self.jobs.pop(address, None)


def make_discovery(*listed: str) -> tuple[DiscoverySync, FakeInstances, FakeSource, ManualClock]:
    clock = ManualClock()
    instances = FakeInstances(clock)
    for address in listed:
        instances.add(address)
    instances.calls.clear()
    source = FakeSource()
    discovery = DiscoverySync(instances, listed, [source], clock)
    return discovery, instances, source, clock


async def tell(discovery: DiscoverySync, source: FakeSource, *addresses: str) -> None:
    source.answer = frozenset(addresses)
    await discovery.read(source)


# ── the sync ────────────────────────────────────────────────────────────────────────────────────


async def test_one_that_a_single_answer_leaves_out_is_kept() -> None:
    """OR-6: DNS answers flap; lanes and all that was learnt of an idle instance outlive that."""
    discovery, instances, source, clock = make_discovery()
    await tell(discovery, source, "a:1", "b:1")
    for _ in range(5):
        await tell(discovery, source, "a:1")
        clock.advance(1)
        await discovery.remove_retired()
        await tell(discovery, source, "a:1", "b:1")
    assert not any(call.startswith("remove") for call in instances.calls)


async def test_one_that_leaves_has_no_more_than_its_grace() -> None:
    discovery, instances, source, clock = make_discovery()
    await tell(discovery, source, "a:1", "b:1")
    instances.jobs = {"b:1": 1}
    await tell(discovery, source, "a:1")
    clock.advance(30)
    await discovery.remove_retired()
    assert "b:1" not in instances.known


async def test_a_source_that_fails_keeps_its_last_list_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    discovery, instances, source, _ = make_discovery()
    await tell(discovery, source, "a:1")
    for _ in range(3):
        source.answer = SourceError("x has no address")
        await discovery.read(source)
    assert instances.known == {"a:1": None}
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert discovery.errors == {"dns:x:1": "x has no address"}
    await tell(discovery, source, "a:1")
    assert discovery.errors == {}
    assert "readable again" in caplog.text


class DiscoveryMachine(RuleBasedStateMachine):
    """Whatever sources say, in any order: the instances are what is named, and leavers finish."""

    NAMES = ("a:1", "b:1", "c:1", "d:1")

    def __init__(self) -> None:
        super().__init__()
        self.discovery, self.instances, self.source, self.clock = make_discovery("a:1")
        self.named = {"a:1"}

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def told(self, names: set[str]) -> None:
        asyncio.run(tell(self.discovery, self.source, *names))
        self.named = names | {"a:1"}

    @rule()
    def fails(self) -> None:
        self.source.answer = SourceError("broken")
        asyncio.run(self.discovery.read(self.source))

    @rule(name=st.sampled_from(NAMES), jobs=st.integers(0, 2))
    def works(self, name: str, jobs: int) -> None:
        if name in self.instances.known:
            self.instances.jobs[name] = jobs

    @rule(seconds=st.sampled_from([0.0, 5.0, 31.0]))
    def sweeps(self, seconds: float) -> None:
        self.clock.advance(seconds)
        before = dict(self.instances.known)
        asyncio.run(self.discovery.remove_retired())
        for name in before.keys() - self.instances.known.keys():
            since = before[name]
            assert since is not None
            assert not self.instances.jobs.get(name) or self.clock.now() - since >= 30

    @invariant()
    def fleet_is_what_is_named(self) -> None:
        staying = {name for name, since in self.instances.known.items() if since is None}
        assert staying == self.named


DiscoveryMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
TestDiscoverySync = DiscoveryMachine.TestCase


# ── names ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_name_stands_for_all_its_records() -> None:
    async def resolver(host: str, port: int) -> list[str]:
        assert (host, port) == ("workers", 8001)
        return ["10.0.0.1", "10.0.0.2", "fd00::1", "10.0.0.1"]

    addresses = await DnsName("dns:workers:8001", resolver).read()
    assert addresses == {"10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"}


async def test_a_name_that_cannot_be_resolved_is_a_source_that_fails() -> None:
    async def fails(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async def nothing(host: str, port: int) -> list[str]:
        return []

    with pytest.raises(SourceError, match="not known"):
        await DnsName("dns:workers:8001", fails).read()
    with pytest.raises(SourceError, match="no address"):
        await DnsName("dns:workers:8001", nothing).read()


# ── spelling ─────────────────────────────────────────────────────────────────────────────────────


@for_each("text", ["a", ":1", "a:", "a:x", "a:0", "a:65536", "::1:8", "a/b:1", "a b:1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|port must be|brackets"):
        check_address(text)
    with pytest.raises(ValueError, match=r"host:port|port must be|brackets"):
        check_entry(f"dns:{text}")


async def test_a_resolver_that_hangs_is_asked_once_and_its_late_answer_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question holds a thread: one every two seconds would leave none for anything else."""
    monkeypatch.setattr(discovery, "ANSWER_S", 0.01)
    answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    asked = 0

    async def hang(host: str, port: int) -> list[str]:
        nonlocal asked
        asked += 1
        return await asyncio.shield(answer)

    name = DnsName("dns:llm:8001", hang)
    for _ in range(3):
        with pytest.raises(SourceError, match=r"llm cannot be resolved: no answer in 0\.01 s"):
            await name.read()
    assert asked == 1
    answer.set_result(["10.0.0.1"])
    assert await name.read() == {"10.0.0.1:8001"}
    assert await name.read() == {"10.0.0.1:8001"}
    assert asked == 2
