"""The engine on its own thread, with real waiting. No test here depends on how fast it is."""

import threading
import time
from collections.abc import Iterator

import pytest

from protocol import Code, Sampling
from tests.support.engine import EOS, Bench, end_of
from worker.core import Event, Job, JobFinished
from worker.engine.engine import Engine, EngineConfig
from worker.runner.synthetic import FreeRunner

PATIENCE_S = 60.0


class Collector:
    """A sink that lets a test wait for a job's end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_ended(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended >= count, PATIENCE_S)

    @property
    def ended(self) -> int:
        return sum(isinstance(e, JobFinished) for e in self.events)


def job(max_tokens: int = 100) -> Job:
    return Job([1, 2, 3], Sampling(max_tokens=max_tokens), time.monotonic() + 1000)


@pytest.fixture
def bench() -> Bench:
    return Bench(blocks=1000, context_tokens=100_000, block_tokens=16)


@pytest.fixture
def engine(bench: Bench) -> Iterator[Engine]:
    engine = Engine(bench.scheduler, FreeRunner([7, 8, 9]), EngineConfig([EOS]))
    yield engine
    engine.stop()
    assert bench.is_clean


def test_the_thread_sleeps_when_idle_and_wakes_on_submit(engine: Engine) -> None:
    sink = Collector()
    engine.start(sink)
    engine.submit(job(max_tokens=1))
    sink.wait_ended(1)
    steps = engine._expiry._checks
    assert not threading.Event().wait(0.05)
    assert engine._expiry._checks <= steps + 1
    engine.submit(job(max_tokens=1))
    sink.wait_ended(2)


def test_a_blocking_sink_holds_the_engine_back(engine: Engine) -> None:
    entered, gate = threading.Event(), threading.Event()

    def sink(events: list[Event]) -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    engine.start(sink)
    engine.submit(job(max_tokens=1000))
    assert entered.wait(PATIENCE_S)
    assert engine.stats().tokens_total <= 8
    gate.set()


def test_a_failing_sink_does_not_stop_the_engine(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Collector()

    def sink(events: list[Event]) -> None:
        seen(events)
        raise RuntimeError("broken sink")

    engine.start(sink)
    engine.submit(job(max_tokens=30))
    seen.wait_ended(1)
    assert "event sink failed" in caplog.text


def test_an_engine_whose_books_are_broken_tells_its_jobs_all_the_same(bench: Bench) -> None:
    sink = Collector()
    bench.scheduler.schedule = lambda now: 1 / 0  # type: ignore[assignment, return-value]
    bench.scheduler.release = lambda request: 1 / 0  # type: ignore[assignment, return-value]
    jobs = [job(), job(), job()]
    for one in jobs:
        bench.engine.submit(one)
    bench.engine.start(sink)
    sink.wait_ended(3)
    assert {end_of(one, sink.events).code for one in jobs} == {Code.DRAINING}
