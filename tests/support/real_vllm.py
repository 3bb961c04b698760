"""The real vLLM on a CPU, where ``make test-engines`` installs it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from protocol import Sampling
from tests.support.vllm_on_cuda import is_interpreted, run_as_on_cuda
from worker.core import Event, Job
from worker.engine.loop import EngineLoop
from worker.engines import load_engine
from worker.environment import nested
from worker.loaded import LoadedEngine
from worker.settings import WorkerSettings

MARKS = [
    pytest.mark.filterwarnings("default"),  # of others' packages
    pytest.mark.timeout(600),
]
FAR = 1e12


def skip_without_vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-engines")


def settings(path: Path, **values: Any) -> WorkerSettings:
    stated = {"model_path": path, "engine": "vllm", "device": "cpu", "dtype": "float32"} | values
    return WorkerSettings(**nested(stated))


@contextmanager
def loaded_by_vllm(path: Path, **values: Any) -> Iterator[LoadedEngine]:
    """A model on it; skips the test where it is not installed."""
    skip_without_vllm()
    stated = settings(path, **{"max_running": 4, "engine_args": {"enforce_eager": "true"}} | values)
    if is_interpreted():
        run_as_on_cuda(stated)
    loaded = load_engine(stated)
    yield loaded
    loaded.engine.stop()


def engine_of(loaded: LoadedEngine) -> EngineLoop:
    assert isinstance(loaded.engine, EngineLoop)
    return loaded.engine


def greedy(ids: Sequence[int], tokens: int) -> Job:
    return Job(ids, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True), FAR)


def finish(
    engine: EngineLoop, jobs: Sequence[Job], look: Callable[[list[Event]], object] = len
) -> list[Event]:
    """Submit jobs and step until nothing is left; ``look`` sees all events so far before each."""
    for job in jobs:
        engine.submit(job)
    events: list[Event] = []
    give_up_at = time.monotonic() + 300
    while engine.has_work:
        look(events)
        events += engine.step()
        assert time.monotonic() < give_up_at
    return events
