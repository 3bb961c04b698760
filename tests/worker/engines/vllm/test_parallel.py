"""A model that is split over two of vLLM's processes, beneath a worker's engine.

On a CPU; over GPUs it differs by what the processes compute on, and by NCCL between them.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import AbortCause, Code, FinishReason
from tests.support import real_vllm
from tests.support.checkpoints import DEMO
from tests.support.engine import end_of, ids_of
from tests.support.likeliest import assert_likeliest, oracle
from tests.support.processes import eventually
from tests.support.real_vllm import greedy, loaded_by_vllm
from tests.worker.engine.test_engine_thread import Collector
from worker.core import Job
from worker.loaded import LoadedEngine

pytestmark = real_vllm.MARKS


@pytest.fixture
def loaded() -> Iterator[LoadedEngine]:
    before = children()
    with loaded_by_vllm(DEMO, max_running=3, tensor_parallel=2) as loaded:
        yield loaded
    eventually(lambda: not any(map(is_worker, children() - before)), "processes are left")


def children() -> set[int]:
    task = Path(f"/proc/{os.getpid()}/task")
    lists = [(each / "children").read_text().split() for each in task.iterdir()]
    return {int(pid) for pids in lists for pid in pids}


def is_worker(pid: int) -> bool:
    """Whether it is one of vLLM's that has not ended, rather than Python's keeper of resources."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"spawn_main" in words or b"Worker" in words


def asking(loaded: LoadedEngine, tokens: int) -> Job:
    return greedy(loaded.tokenizer.encode("What is a tide?"), tokens)


def test_texts_cancels_and_the_card_are_those_of_one_process(loaded: LoadedEngine) -> None:
    assert (loaded.card.tensor_parallel, loaded.card.device) == (2, "cpu")
    sink = Collector()
    loaded.engine.start(sink)
    gone, kept = asking(loaded, 500), asking(loaded, 24)
    loaded.engine.submit(gone)
    loaded.engine.submit(kept)
    sink.wait_ended(1)
    loaded.engine.cancel(gone, AbortCause.CANCEL)
    sink.wait_ended(2)
    assert end_of(kept, sink.events).reason is FinishReason.LENGTH
    assert end_of(gone, sink.events).code is Code.CANCELLED
    assert_likeliest(oracle(DEMO), list(kept.token_ids), ids_of(kept, sink.events))
    assert loaded.engine.stats().kv_blocks_used == 0


def test_when_one_of_its_processes_dies_the_engine_has_failed(loaded: LoadedEngine) -> None:
    sink = Collector()
    loaded.engine.start(sink)
    lost = asking(loaded, 1500)
    loaded.engine.submit(lost)
    eventually(lambda: sink.events, "its first event")
    workers = [pid for pid in children() if is_worker(pid)]
    assert len(workers) >= 2
    os.kill(workers[-1], signal.SIGKILL)
    sink.wait_ended(1)
    assert loaded.engine.has_failed
    assert end_of(lost, sink.events).code is Code.INSTANCE_LOST
