"""Jobs of an engine, with the time of every event. No settings, no tokenizer."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from perf import SEED
from protocol import Sampling
from worker.core import EngineService, Event, Job, JobFinished, JobTokens
from worker.engine.engine import Engine

NEVER: Final = 1e12
"""Deadline that no job lasts until."""


class Prompts:
    """Random prompts, none of which begins like another."""

    def __init__(self, vocab_size: int, seed: int = SEED) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def draw(self, tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(10, self._vocab_size, tokens).tolist()
        return ids


def greedy(ids: list[int], tokens: int, *, session: str = "") -> Job:
    """Job of exactly ``tokens`` greedy tokens, whatever they are."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Job(ids, sampling, NEVER, session=session)


@dataclass
class EngineRun:
    """One job: when it was submitted, when its tokens came, how it ended. Seconds."""

    job: Job
    submitted_at: float
    token_times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finished: JobFinished | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.submitted_at


class Runs:
    """Records the events of an engine's jobs, on whichever thread it is stepped."""

    def __init__(self, engine: EngineService) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._runs: dict[int, EngineRun] = {}

    def submit(self, job: Job) -> EngineRun:
        run = EngineRun(job, time.perf_counter())
        with self._changed:
            self._runs[id(job)] = run
        self.engine.submit(job)
        return run

    def take(self, events: list[Event]) -> None:
        """Note the events of a step."""
        now = time.perf_counter()
        with self._changed:
            for event in events:
                run = self._runs.get(id(event.job))
                if run is None:  # submitted elsewhere
                    continue
                if isinstance(event, JobTokens):
                    run.token_times += [now] * len(event.ids)
                    run.ids += event.ids
                elif isinstance(event, JobFinished):
                    run.finished = event
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Wait for ``condition``, which is asked after every step with events; False when time is
        up."""
        with self._changed:
            return self._changed.wait_for(condition, within_s)

    def wait(self, runs: Sequence[EngineRun], within_s: float) -> bool:
        """Wait until each run has ended; False when time is up."""
        return self.wait_for(lambda: all(run.finished is not None for run in runs), within_s)

    def step(self) -> None:
        """Step the engine once on this thread."""
        self.take(_ours(self.engine).step())

    def step_until_idle(self) -> None:
        """Step the engine on this thread until nothing is left to do."""
        engine = _ours(self.engine)
        self.take(engine.step())
        while engine.scheduler.has_work:
            self.take(engine.step())


class Stepping(Runs):
    """Steps the engine on a thread of its own; a context manager that ends it, not the engine."""

    def __enter__(self) -> "Stepping":
        self._stopping = False
        self._thread = threading.Thread(target=self._step, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()

    def _step(self) -> None:
        engine = _ours(self.engine)
        while not self._stopping:
            if events := engine.step():
                self.take(events)
            elif not engine.scheduler.has_work:
                time.sleep(0.0005)


def _ours(engine: EngineService) -> Engine:
    """``engine`` as one that can be stepped from outside."""
    assert isinstance(engine, Engine)
    return engine
