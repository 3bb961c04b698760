"""Real Tritons for all of these tests: the demo model, and the paced synthetic engine for
timing-free fault tests (a generation that lasts as long as a test wants). They end with the last of
them, and not with the session: idle Tritons take a share of the processor too."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.support.processes import Marked, eventually
from tests.support.stack import Orchestrator, Triton, running, started
from tests.support.triton_models import write_slow_model

FOLDER = Path(__file__).parent


TIMEOUT_S = 300
"""Of each test here, where it states none: it may be the one that has to start the Tritons."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@dataclass
class Stack:
    """Triton and orchestrator together."""

    triton: Triton
    orchestrator: Orchestrator
    slow: Path | None = None
    """While this is there, each step takes 30 ms longer."""

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """A text takes seconds meanwhile, so that what is to happen within it does, even where the
        processor is taken from the test for a while."""
        assert self.slow is not None, "this stack's model cannot be slowed"
        self.slow.touch()
        try:
            yield
        finally:
            self.slow.unlink()

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


def stack_of(triton: Triton, slow: Path | None = None, **settings: object) -> Iterator[Stack]:
    """Start ``triton`` and an orchestrator with ``settings`` in front of it; end both."""
    with started(triton):
        orchestrator = Orchestrator(triton.grpc, **settings)
        with running(orchestrator):
            yield Stack(triton, orchestrator, slow)


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model on the CPU."""
    folder = tmp_path_factory.mktemp("demo")
    slow = folder / "slow"
    yield from stack_of(Triton(repository=write_slow_model(folder / "models", slow)), slow)


@pytest.fixture(scope="package")
def paced() -> Iterator[Stack]:
    """The synthetic engine at 20 ms a step: long generations at no cost."""
    yield from stack_of(Triton(engine="synthetic-paced"))


@pytest.fixture(scope="package")
def slots() -> Iterator[Triton]:
    """The slot model on the CPU, without a text model next to it."""
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    sizes = {"size": 96, "seconds": 6, "buffer_s": 0.2, "slots": 2}
    triton = Triton(model="slot", **sizes, **{"clips.render.queue.MOST_WAITING": 200})
    with started(triton):
        yield triton


@pytest.fixture
def marks() -> Iterator[list[Marked]]:
    """Every process of these is killed in the end, so that a failed test leaves none either."""
    marks: list[Marked] = []
    yield marks
    for marked in marks:
        for pid in marked.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the service that a module calls ``stack``; nothing may be left on it."""
    async with aiohttp.ClientSession(stack.url) as session:
        yield session
    stack.assert_idle()


@pytest.fixture
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test nothing may be left on any stack that it used."""
    yield
    for name in ("demo", "paced"):
        if name in request.fixturenames:
            request.getfixturevalue(name).assert_idle()
