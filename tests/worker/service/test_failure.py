"""A worker whose engine has failed ends its process, once its jobs have been answered."""

import threading
from collections.abc import Iterator

import pytest

from tests.worker.service.conftest import Harness, serving
from worker.core import Job
from worker.protocol import AbortCause, Code, FinishReason
from worker.service import failure
from worker.text import Tokenizer


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def harness(
    tokenizer: Tokenizer, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Harness]:
    monkeypatch.setattr(failure, "LAST_WORDS_S", 0.02)
    with serving(tokenizer, die=ended.set) as harness:
        yield harness


def answer_as_failed(harness: Harness, job: Job) -> None:
    harness.finish(job, FinishReason.CANCELLED, Code.DRAINING)


def test_a_failed_engine_ends_the_process_after_its_jobs_were_answered(
    harness: Harness, ended: threading.Event
) -> None:
    harness.engine.on_cancel = lambda job, cause: None  # it is dead
    job, _ = harness.submit(1)
    harness.begin(job)
    harness.engine.has_failed = True
    harness.lane.wait(lambda: any(f.draining for f in harness.lane.frames()), "the drain")
    assert not ended.wait(0.1), "a job is not answered yet"
    answer_as_failed(harness, job)
    assert harness.wait_end(1).code is Code.DRAINING
    harness.lane.wait_final()
    assert ended.wait(20)


def test_a_job_that_a_failed_engine_does_not_end_holds_nothing_up(
    harness: Harness, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "MOST_S", 0.05)
    harness.engine.on_cancel = lambda job, cause: None
    job, _ = harness.submit(1)
    harness.engine.has_failed = True
    assert ended.wait(20)
    assert job.abort is AbortCause.DRAIN
    answer_as_failed(harness, job)  # for the harness, which waits for it


def test_an_engine_that_works_is_left_alone(harness: Harness, ended: threading.Event) -> None:
    job, _ = harness.submit(1)
    harness.finish(job)
    harness.wait_end(1)
    assert not ended.wait(0.1)
