"""A worker that can be told to serve another model."""

import pytest

from tests.orchestrator.conftest import MakeWorker
from tests.support.fake_worker import FakeWorker


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    made = await make_worker()
    made.can_load("other")
    return made
