"""The fixture ``make_service`` of tests/orchestrator, for services with clips."""

from collections.abc import AsyncIterator

import pytest

from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_slots import clips_of
from tests.support.fake_worker import FakeWorker


@pytest.fixture
async def make_service(make_service: MakeService) -> AsyncIterator[MakeService]:
    """Start orchestrators that serve clips. Each offered clip must have ended once (DL-10)."""
    made: list[Service] = []

    async def make(*workers: FakeWorker, **changes: object) -> Service:
        service = await make_service(*workers, **({"slots__serve": True} | changes))
        made.append(service)
        return service

    yield make
    for service in made:
        await service.parts.lifecycle.drain(0.0)
        offered = service.metric("tidegate_slots_offered_total")
        assert sum(clips_of(service.orchestrator).ledger.settled.values()) == offered
