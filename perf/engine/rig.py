"""An engine on its own thread, with the time of every event."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from perf.stack.context import SEED
from worker.core import Event, Job, JobFinished, JobTokens
from worker.engine.build import LoadedEngine, build_engine
from worker.engine.engine import Engine
from worker.models.model import Model
from worker.protocol import Sampling
from worker.runner.torch_runner import TorchRunner
from worker.settings import WorkerSettings

_PATIENCE_S: Final = 600.0
_FAR: Final = 1e12


class Prompts:
    """Random prompts, none of which begins like another."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng(SEED)
        self._vocab_size = vocab_size

    def draw(self, tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(10, self._vocab_size, tokens).tolist()
        return ids


@dataclass
class Run:
    """One job: when it was submitted, when its tokens came, how it ended. Seconds."""

    job: Job
    submitted_at: float
    token_times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finished: JobFinished | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.submitted_at

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.token_times)]


class Rig:
    """A started engine; a context manager that stops it."""

    def __init__(self, path: Path, device: str, **changes: object) -> None:
        settings = WorkerSettings(model_path=path, device=device, **changes)  # type: ignore[arg-type]
        self.loaded: LoadedEngine = build_engine(settings)
        assert isinstance(self.loaded.engine, Engine)
        self.engine: Engine = self.loaded.engine
        self.prompts = Prompts(self.loaded.card.vocab_size)
        self._news = threading.Condition()
        self._runs: dict[int, Run] = {}
        self.engine.start(self._take)

    @property
    def model(self) -> Model:
        runner = self.engine._runner
        assert isinstance(runner, TorchRunner)
        model: Model = runner._forward.model  # type: ignore[union-attr]
        return model

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def submit(self, ids: list[int], tokens: int, session: str = "") -> Run:
        """Greedy, exactly ``tokens`` tokens."""
        job = Job(
            ids,
            Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            _FAR,
            session=session,
        )
        run = Run(job, time.perf_counter())
        with self._news:
            self._runs[id(job)] = run
        self.engine.submit(job)
        return run

    def wait(self, *runs: Run, tokens: int | None = None) -> None:
        """Until each run has ended, or has ``tokens`` tokens. Raises when one ends badly."""

        def done(run: Run) -> bool:
            return run.finished is not None or (
                tokens is not None and len(run.token_times) >= tokens
            )

        self._wait_for(lambda: all(map(done, runs)))
        for run in runs:
            if run.finished is not None and run.finished.code is not None:
                raise RuntimeError(f"a job ended with {run.finished.code}: {run.finished.message}")

    def wait_ended(self, *runs: Run) -> None:
        """Until each run has ended, however it does."""
        self._wait_for(lambda: all(run.finished is not None for run in runs))

    def ask(self, ids: list[int], tokens: int, session: str = "") -> Run:
        """Submit and wait."""
        run = self.submit(ids, tokens, session)
        self.wait(run)
        return run

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._news:
            if not self._news.wait_for(condition, _PATIENCE_S):
                raise TimeoutError(f"no answer from the engine within {_PATIENCE_S:g} s")

    def _take(self, events: list[Event]) -> None:
        now = time.perf_counter()
        with self._news:
            for event in events:
                run = self._runs[id(event.job)]
                if isinstance(event, JobTokens):
                    run.token_times += [now] * len(event.ids)
                    run.ids += event.ids
                elif isinstance(event, JobFinished):
                    run.finished = event
            self._news.notify_all()
