"""Orchestrators that share a store, in front of the same worker."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perf.stack.store import StoreServer, store_program, store_server
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker

LEASE_S = 0.5


@pytest.fixture(scope="session")
def program() -> str:
    found = store_program()
    if found is None:
        pytest.skip("needs redis-server or valkey-server (apt-get install redis-server)")
    return found


@pytest.fixture
async def store(program: str, tmp_path: Path) -> AsyncIterator[StoreServer]:
    async with store_server(program, tmp_path) as server:
        yield server


class FleetOf:
    """Makes members of one fleet."""

    def __init__(self, make_service: MakeService, store: StoreServer) -> None:
        self._make_service = make_service
        self.store = store

    async def member(self, *workers: FakeWorker, **changes: object) -> Service:
        values = {"state__url": self.store.url, "state__lease_s": LEASE_S}
        service = await self._make_service(*workers, **(values | changes))
        service.parts.lifecycle.join(service.url, "")
        fleet = service.orchestrator.fleet
        assert fleet is not None
        await service.until(lambda: bool(fleet.members.has_renewed))
        return service


@pytest.fixture
def fleet_of(store: StoreServer, make_service: MakeService) -> FleetOf:
    return FleetOf(make_service, store)


async def see_each_other(*services: Service) -> None:
    """Wait until each has seen all others."""
    for service in services:
        fleet = service.orchestrator.fleet
        assert fleet is not None
        await service.until(lambda fleet=fleet: fleet.members.alive == len(services))  # type: ignore[misc]


def freeze(service: Service) -> None:
    """A member as the others see one that was killed: its lease is not renewed, and it writes
    nothing any more."""
    fleet, durable = service.orchestrator.fleet, service.orchestrator.stages.durable
    assert fleet is not None and durable is not None
    renewing = fleet.members._renewing
    assert renewing is not None
    renewing.cancel()
    fleet._takeover.close()  # type: ignore[union-attr]
