"""Real Tritons for the session: the demo model, and the paced synthetic engine for timing-free
fault tests (a generation that lasts as long as a test wants)."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.stack import Orchestrator, Triton, eventually


@dataclass
class Stack:
    """Triton and orchestrator together."""

    triton: Triton
    orchestrator: Orchestrator

    @property
    def url(self) -> str:
        return self.orchestrator.url

    def assert_idle(self) -> None:
        """Nothing runs, nothing waits, and every KV block is back (WP-4, WK-4)."""

        def idle() -> bool:
            metric = self.orchestrator.metric
            used, free, total = (
                metric("tidegate_kv_blocks", kind=kind) for kind in ("used", "free", "total")
            )
            busy = metric("tidegate_worker_jobs")
            return total > 0 and used == 0 and free == total and busy == 0

        eventually(idle, "every KV block to be free and nothing to run")


def _stack(**worker: object) -> Iterator[Stack]:
    triton = Triton(**worker)
    try:
        triton.start()
        orchestrator = Orchestrator(triton.grpc)
        orchestrator.start()
        try:
            yield Stack(triton, orchestrator)
        finally:
            assert orchestrator.stop() == 0, "the orchestrator did not end cleanly"
    finally:
        triton.close()


@pytest.fixture(scope="session")
def demo() -> Iterator[Stack]:
    """The demo model on the CPU."""
    yield from _stack()


@pytest.fixture(scope="session")
def paced() -> Iterator[Stack]:
    """The synthetic engine at 20 ms a step: long generations at no cost."""
    yield from _stack(engine="synthetic-paced")


@pytest.fixture(scope="session")
def slots() -> Iterator[Triton]:
    """The slot model on the CPU, without a text model beside it."""
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    sizes = {"size": 96, "seconds": 6, "buffer_s": 0.2, "slots": 2, "max_waiting": 200}
    # Unlocked, so that a client may have tensors in its own shared memory.
    triton = Triton(model="slot", is_locked=False, **sizes)
    try:
        triton.start()
        yield triton
    finally:
        triton.close()


@pytest.fixture
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test nothing may be left on any stack that it used."""
    yield
    for name in ("demo", "paced"):
        if name in request.fixturenames:
            request.getfixturevalue(name).assert_idle()
