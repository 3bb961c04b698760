"""A worker's engine from a checkpoint, on its own thread, with the events of its jobs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from perf.engine.runs import EngineRun, Prompts, Runs, greedy
from worker.core import Job
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.environment import nested
from worker.loaded import LoadedEngine
from worker.models.model import Model
from worker.runner.torch_runner import TorchRunner
from worker.settings import WorkerSettings

_PATIENCE_S: Final = 600.0

T = TypeVar("T")


def run_beside(call: Callable[[], T]) -> T:
    """Run ``call`` on a thread that ends with it: the engine goes on as fast as before.

    OpenMP keeps workers for every thread that has computed, and when there are more of them than
    cores none may spin any more: the engine's steps would take a third longer from then on.
    """
    with ThreadPoolExecutor(1, "bench-beside") as pool:
        return pool.submit(call).result()


class EngineRig:
    """A started engine; a context manager that stops it."""

    def __init__(self, path: Path, device: str, **changes: object) -> None:
        """``changes`` to a worker's settings, with ``__`` for each dot of a name."""
        settings = WorkerSettings(model_path=path, device=device, **nested(changes))
        self.loaded: LoadedEngine = build_engine(settings)
        assert isinstance(self.loaded.engine, Engine)
        self.engine: Engine = self.loaded.engine
        self.prompts = Prompts(self.loaded.card.vocab_size)
        self._runs = Runs(self.engine)
        self.engine.start(self._runs.take)

    @property
    def model(self) -> Model:
        runner = self.engine.executor.runner
        assert isinstance(runner, TorchRunner)
        model: Model = runner._forward.model  # type: ignore[union-attr]
        return model

    def __enter__(self) -> "EngineRig":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def submit(self, ids: list[int], tokens: int, session: str = "") -> EngineRun:
        """Submit a greedy job of exactly ``tokens`` tokens."""
        return self.submit_job(greedy(ids, tokens, session=session))

    def submit_job(self, job: Job) -> EngineRun:
        """Submit a job of any kind."""
        return self._runs.submit(job)

    def wait(self, *runs: EngineRun, tokens: int | None = None) -> None:
        """Wait until each run has ended, or has ``tokens`` tokens. Raises when one ends badly."""

        def done(run: EngineRun) -> bool:
            return run.finished is not None or (
                tokens is not None and len(run.token_times) >= tokens
            )

        self._wait_for(lambda: all(map(done, runs)))
        for run in runs:
            if run.finished is not None and run.finished.code is not None:
                raise RuntimeError(f"a job ended with {run.finished.code}: {run.finished.message}")

    def wait_ended(self, *runs: EngineRun) -> None:
        """Wait until each run has ended, well or badly."""
        self._runs.wait_ended(*runs, within_s=_PATIENCE_S)

    def ask(self, ids: list[int], tokens: int, session: str = "") -> EngineRun:
        """Submit a job and wait for its end."""
        run = self.submit(ids, tokens, session)
        self.wait(run)
        return run

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        if not self._runs.wait_for(condition, _PATIENCE_S):
            raise TimeoutError(f"no answer from the engine within {_PATIENCE_S:g} s")
