"""WK-9: many agents at once, each gets its own and nothing is left behind."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from protocol import AbortCause, FinishReason, Sampling
from tests.support.checkpoints import make_checkpoint
from worker.core import Event, Job, JobFinished, JobTokens
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.settings import KvSettings, WorkerSettings

pytestmark = pytest.mark.slow

AGENTS, REQUESTS, TEXTS = 10, 50, 4
FAR = 1e12


class Service:
    """A running engine whose events are sorted by job, for any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._queues: dict[Job, SimpleQueue[Event]] = {}
        self.strays: list[Event] = []
        engine.start(self._sort)

    def _sort(self, events: list[Event]) -> None:
        for event in events:
            with self._lock:
                queue = self._queues.get(event.job)
            if queue is None:
                self.strays.append(event)
            else:
                queue.put(event)

    def ask(self, job: Job, cancel_after: int | None = None) -> tuple[list[int], JobFinished]:
        queue: SimpleQueue[Event] = SimpleQueue()
        with self._lock:
            self._queues[job] = queue
        self.engine.submit(job)
        ids: list[int] = []
        if cancel_after == 0:
            self.engine.cancel(job, AbortCause.CANCEL)
        while True:
            event = queue.get(timeout=60)
            if isinstance(event, JobTokens):
                ids += event.ids
                if cancel_after is not None and len(ids) >= cancel_after:
                    self.engine.cancel(job, AbortCause.CANCEL)
            elif isinstance(event, JobFinished):
                with self._lock:
                    del self._queues[job]
                assert queue.empty(), "something followed the end"
                return ids, event


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    settings = WorkerSettings(
        model_path=make_checkpoint(tmp_path),
        device="cpu",
        deterministic=True,
        kv=KvSettings(block_tokens=4, blocks=120),
        max_running=6,
        max_step_tokens=24,
    )
    engine = build_engine(settings).engine
    assert isinstance(engine, Engine)
    running = Service(engine)
    yield running
    engine.stop()


def job_of(agent: int, text: int) -> Job:
    draw = np.random.default_rng((agent, text))
    ids = draw.integers(3, 300, int(draw.integers(1, 24))).tolist()
    asked = Sampling(
        max_tokens=3 + text,
        temperature=float(draw.choice([0.0, 1.0])),
        seed=agent,
        frequency_penalty=float(draw.choice([0.0, 0.8])),
        logit_bias=((agent + 20, 3.0),) if text % 2 else (),
        ignore_eos=True,
    )
    return Job(ids, asked, FAR)


def test_10_agents_of_50_rapid_requests_stay_isolated(service: Service) -> None:
    """Slots, blocks, the prefix cache and the sampler's tables change hands all the time."""
    expected = {
        (agent, text): service.ask(job_of(agent, text))[0]
        for agent in range(AGENTS)
        for text in range(TEXTS)
    }
    assert len(set(map(tuple, expected.values()))) > AGENTS

    def run(agent: int) -> int:
        cancelled = 0
        for number in range(REQUESTS):
            text = (number * 7 + agent) % TEXTS
            leaves = number % 10 == 9
            ids, end = service.ask(job_of(agent, text), number % 3 if leaves else None)
            whole = expected[agent, text]
            if end.reason is FinishReason.CANCELLED:
                assert leaves and ids == whole[: len(ids)]
                cancelled += 1
            else:
                assert end.code is None and ids == whole
        return cancelled

    with ThreadPoolExecutor(AGENTS) as agents:
        assert sum(agents.map(run, range(AGENTS))) > 0
    service.engine.stop()
    scheduler = service.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_work and scheduler.pool.used_count == 0
    assert len(scheduler._free_slots) == 6
    assert service.strays == []
    assert service.engine.stats().jobs_total == AGENTS * (TEXTS + REQUESTS)
