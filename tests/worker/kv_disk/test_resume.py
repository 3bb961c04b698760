"""A conversation on the real engine and real files, across restarts."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from protocol import Sampling
from tests.support.checkpoints import DEMO
from tests.support.engine import end_of, ids_of
from tests.support.real_weights import smollm2
from tests.worker.engine.test_engine_thread import PATIENCE_S, Collector
from worker.core import Job
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.environment import nested
from worker.kv_disk.transfers import BackgroundThread
from worker.settings import WorkerSettings

LONG = np.random.default_rng(3).integers(10, 2000, 300).tolist()
ANSWER = 20
"""Tokens."""


@pytest.fixture(autouse=True)
def disk_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is on this machine's: a fifth of a disk stays free."""
    roomy = SimpleNamespace(free=2**40, used=0, total=2**40)
    monkeypatch.setattr("worker.kv_disk.block_store.shutil.disk_usage", lambda path: roomy)


class Server:
    """An engine on its own thread; ``say`` waits for the whole answer."""

    def __init__(self, disk: Path | None, model: Path = DEMO, **changes: object) -> None:
        # What is computed again comes in other chunks than before: the same bits in this mode only.
        values = {"device": "cpu", "deterministic": True, "kv__disk_path": disk} | changes
        bundle = build_engine(WorkerSettings(model_path=model, **nested(values)))
        assert isinstance(bundle.engine, Engine)
        self.engine = bundle.engine
        self._told = Collector()
        self._asked = 0
        self.engine.start(self._told)

    def say(self, ids: list[int], session: str = "", **sampling: object) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt's were not computed."""
        parameters = {"max_tokens": ANSWER, "ignore_eos": True, "temperature": 0.9, "seed": 5}
        job = Job(ids, Sampling(**(parameters | sampling)), 1e12, session=session)  # type: ignore[arg-type]
        self.engine.submit(job)
        self._asked += 1
        self._told.wait_ended(self._asked)
        events = self._told.events
        return ids_of(job, events), end_of(job, events).cached_tokens

    def stop(self) -> None:
        self.engine.stop()
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.pool.used_count == 0


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    running: list[Server] = []
    yield running
    for server in running:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: DEMO, smollm2], ids=["demo", "smollm2"])
def test_wk6_a_conversation_survives_a_restart_bit_by_bit(
    tmp_path: Path, servers: list[Server], model: Callable[[], Path]
) -> None:
    """WK-5, WK-6: the same tokens as from an engine that was never stopped, and from a cold one."""
    path = model()
    first = Server(tmp_path, path)
    servers.append(first)
    answer, cached = first.say(LONG, "chat")
    assert cached == 0
    question = LONG + answer + LONG[:5]
    unbroken, in_memory = first.say(question)
    first.stop()
    assert first.engine.stats().disk_saved_blocks_total == (len(LONG) + ANSWER - 1) // 16

    second = Server(tmp_path, path)
    servers.append(second)
    resumed, from_disk = second.say(question, "chat")
    assert resumed == unbroken
    assert from_disk == in_memory == (len(LONG) + ANSWER - 1) // 16 * 16
    stats = second.engine.stats()
    assert stats.disk_loaded_blocks_total == from_disk // 16
    assert stats.prefill_tokens_total == len(question) - from_disk
    assert stats.disk_load_ms_total > 0 and stats.disk_failures_total == 0

    cold = Server(None, path, kv__prefix_cache=False)
    servers.append(cold)
    assert cold.say(question) == (unbroken, 0)


@pytest.mark.slow
def test_a_disk_that_stalls_is_not_waited_for(tmp_path: Path, servers: list[Server]) -> None:
    """WK-5: the head is computed instead, to the same tokens, while a file still blocks."""
    first = Server(tmp_path)
    servers.append(first)
    answer, _ = first.say(LONG, "chat")
    first.stop()
    second = Server(tmp_path)
    servers.append(second)
    files = list(tmp_path.glob("*/blocks/*/*.safetensors"))
    for path in files:
        path.unlink()
        os.mkfifo(path)  # who opens it waits for a writer
    assert second.say(LONG, "chat") == (answer, 0)
    assert second.engine.stats().disk_failures_total == 0, "its load is still waiting"
    for path in files:
        os.close(os.open(path, os.O_RDWR))


def test_directories_of_other_models_are_logged(
    tmp_path: Path, servers: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ("a" * 32) / "blocks").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    with caplog.at_level(logging.INFO):
        servers.append(Server(tmp_path))
    told = [line for line in caplog.messages if "another model or" in line]
    assert len(told) == 1 and str(tmp_path / ("a" * 32)) in told[0]


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match=r"KV__DISK_PATH.*cannot be used"):
        Server(path)


def test_a_failing_task_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    thread = BackgroundThread("test")
    done = threading.Event()
    thread.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    thread.submit(done.set)
    assert done.wait(PATIENCE_S)
    thread.close(PATIENCE_S)
    thread.close(PATIENCE_S)
    assert "background task of test failed" in caplog.text
