"""What must not cost anybody else: one bad request, one bad sender, one unlucky moment."""

import threading

import pytest

from protocol import AbortCause, Cancel, Code
from tests.support.triton_calls import FakeResponder, lane_call, plain_call
from tests.worker.service.conftest import Harness
from worker.service.call import Tensors
from worker.text import Tokenizer


class Gate:
    """Holds the emitter's thread, so that what comes meanwhile is one cycle's work."""

    def __init__(self, harness: Harness) -> None:
        self._open = threading.Event()
        held = threading.Event()
        harness.service.emitter.post(lambda: (held.set(), self._open.wait(60))[0])
        assert held.wait(60)

    def open(self) -> None:
        self._open.set()


def test_a_sender_that_fails_costs_no_other_request_its_end(harness: Harness) -> None:
    class Broken(FakeResponder):
        def close(self) -> None:
            raise RuntimeError("Triton refused")

    job, request = harness.submit(1)
    gate = Gate(harness)
    harness.service.accept(lane_call(Cancel("lane", [99]), Broken()))
    harness.finish(job)
    gate.open()
    harness.wait_end(1)
    request.wait_final()


def test_an_answer_that_cannot_be_made_ends_its_request_and_no_other(harness: Harness) -> None:
    class Broken(FakeResponder):
        def send(self, tensors: Tensors, *, final: bool = False) -> None:
            raise MemoryError("no room for a tensor")

    broken, sound = Broken(), FakeResponder()
    harness.service.accept(plain_call("ab", broken))
    harness.service.accept(plain_call("ab", sound))
    first, second = harness.engine.wait_submitted(2)
    gate = Gate(harness)
    harness.finish(first)
    harness.finish(second)
    gate.open()
    broken.wait_final()
    sound.wait_final()
    assert broken.error is not None and broken.error[0] == Code.INTERNAL
    assert sound.error is None


def test_wp3_a_job_that_meets_the_loss_of_its_lane_is_stopped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WP-3: the lane is lost after the submission found it open, before the job is known."""
    real = Tokenizer.stream_for

    def lose_lane_first(self: Tokenizer, *args: object) -> object:
        harness.lane.cancelled = True
        harness.lane.wait_final()
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "stream_for", lose_lane_first)
    job, request = harness.submit(5)
    assert harness.engine.wait_cancelled(1) == [(job, AbortCause.LANE_LOST)]
    request.wait_final()


def test_dl2_a_relative_deadline_counts_from_arrival(harness: Harness) -> None:
    """DL-2: not from when the intake thread gets to it."""
    service = harness.service
    waiting = threading.Event()
    service._plain._thread.submit(waiting.wait, 60)
    earliest = harness.clock()
    service.accept(plain_call("ab", FakeResponder(), parameters={"deadline_ms": 200}))
    latest = harness.clock()
    harness.clock.passed_s += 10
    waiting.set()
    job = harness.engine.wait_submitted(1)[0]
    assert earliest - 1e-6 <= job.deadline - 0.2 <= latest + 1e-6
    harness.finish(job)
