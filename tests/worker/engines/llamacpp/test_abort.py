"""A step whose jobs have all been given up is stopped."""

import math
import threading
import time
from collections.abc import Iterator

import pytest

from protocol import AbortCause, Sampling
from worker.core import Job
from worker.engines.llamacpp.abort import StepAborter


class Step:
    """What llama.cpp would be told."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self, wanted: bool) -> None:
        if wanted:
            self.stopped.set()
        else:
            self.stopped.clear()


@pytest.fixture
def step() -> Step:
    return Step()


@pytest.fixture
def watch(step: Step) -> Iterator[StepAborter]:
    watch = StepAborter(step.stop, time.monotonic)
    yield watch
    watch.close()
    watch.close()


def job(deadline_s: float = math.inf) -> Job:
    return Job([1], Sampling(max_tokens=1), time.monotonic() + deadline_s)


def test_it_goes_on_while_one_job_is_wanted(watch: StepAborter, step: Step) -> None:
    jobs = [job(), job(0.01)]
    watch.begin(jobs)
    assert not step.stopped.wait(0.05)
    jobs[0].abort = AbortCause.CANCEL
    watch.look()
    assert step.stopped.wait(60)


def test_the_last_deadline_stops_it(watch: StepAborter, step: Step) -> None:
    watch.begin([job(0.01), job(0.02)])
    assert step.stopped.wait(60)


def test_what_was_given_up_before_it_began_stops_it(watch: StepAborter, step: Step) -> None:
    given_up = job()
    given_up.abort = AbortCause.DISCONNECT
    watch.begin([given_up])
    assert step.stopped.wait(60)


def test_the_next_step_runs(watch: StepAborter, step: Step) -> None:
    watch.begin([job(0.01)])
    assert step.stopped.wait(60)
    watch.end()
    assert not step.stopped.is_set()
    watch.look()
    watch.begin([job()])
    assert not step.stopped.wait(0.05)
