"""A client's time, and a real orchestrator in front of a fake worker."""

import pytest

from pool import command
from pool.spec import LaunchSpec
from tests.orchestrator.conftest import make_service, make_worker, service, worker
from tidegate import _clock

__all__ = ["FakeTime", "fake_time", "make_service", "make_worker", "service", "worker"]


class FakeTime:
    """Pauses take none of the test's time; it stands still otherwise."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(_clock, "now", time.now)
    monkeypatch.setattr(_clock, "sleep", time.sleep)
    return time


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What ``tidegate up`` would launch."""
    specs: list[LaunchSpec] = []

    def launch(spec: LaunchSpec, **_: object) -> int:
        specs.append(spec)
        return 0

    monkeypatch.setattr(command, "run", launch)
    return specs
