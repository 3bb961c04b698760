"""Orchestrators that share a store, in front of the same worker."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.state.shared_state import SharedState
from perf.stack.store import StoreServer, store_program, store_server
from tests.orchestrator.conftest import MakeService, Service
from tests.orchestrator.tasks.journal.conftest import disk, restarts
from tests.support.fake_worker import FakeWorker
from tests.support.rough_network import RoughNetwork, rough_network

__all__ = ["disk", "restarts"]  # fixtures
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


@pytest.fixture
async def network(store: StoreServer) -> AsyncIterator[RoughNetwork]:
    async with rough_network(store.port) as found:
        yield found


class Sharing:
    """Makes orchestrators that share one store."""

    def __init__(
        self, make_service: MakeService, store: StoreServer, network: RoughNetwork
    ) -> None:
        self._make_service = make_service
        self.store = store
        self.network = network
        """A network through which the store is found at ``far_url``."""
        self.far_url = store.url_at(network.port)

    async def member(self, *workers: FakeWorker, **changes: object) -> Service:
        """One that has joined, with these settings in addition to the usual ones."""
        service = await self.loner(*workers, **changes)
        await service.until(lambda: bool(state_of(service).members.has_renewed))
        return service

    async def members(
        self, *workers: FakeWorker, count: int = 2, **changes: object
    ) -> list[Service]:
        """So many, each of which has seen the others."""
        made = [await self.member(*workers, **changes) for _ in range(count)]
        await see_each_other(*made)
        return made

    async def loner(self, *workers: FakeWorker, joins_with: str = "", **changes: object) -> Service:
        """One that may never reach the store; ``joins_with`` is the digest of its keys."""
        values = {"state__url": self.store.url, "LEASE_S": LEASE_S}
        service = await self._make_service(*workers, **(values | changes))
        service.parts.lifecycle.join(urlsplit(service.url).port or 0, joins_with)
        return service


@pytest.fixture
def sharing(store: StoreServer, network: RoughNetwork, make_service: MakeService) -> Sharing:
    """The network and the store outlive the orchestrators."""
    return Sharing(make_service, store, network)


def state_of(service: Service) -> SharedState:
    """What an orchestrator shares."""
    shared = service.orchestrator.sharing
    assert isinstance(shared, SharedState)
    return shared


async def see_each_other(*services: Service) -> None:
    """Wait until each has seen all others."""
    for service in services:
        members = state_of(service).members
        await service.until(lambda members=members: members.alive == len(services))  # type: ignore[misc]


def is_dead(seer: Service, seen: Service) -> bool:
    """Whether an orchestrator knows that another one is dead."""
    found = state_of(seer).members.others.get(state_of(seen).tasks.tag)
    return found is None or not found.is_alive


async def until_in_store(store: StoreServer, task_id: str, field: str) -> None:
    """Wait until the store has that of a task."""
    async with store.client() as client:
        while not await client.hexists("{tidegate}:task:" + task_id, field):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def freeze(service: Service) -> None:
    """An orchestrator as the others see one that was killed: it renews no lease any more, and takes
    nothing on."""
    shared = state_of(service)
    assert shared.members._renewing is not None and shared._takeover is not None
    shared.members._renew = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    shared.members._renewing.cancel()
    shared._takeover.close()
