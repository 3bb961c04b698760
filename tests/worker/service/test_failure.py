"""A worker whose engine has failed or hangs ends its process, once its jobs have been answered."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from protocol import AbortCause, Code, FinishReason
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.worker.service.conftest import Harness, serving
from worker.core import StepUnderWay
from worker.service import failure
from worker.service.failure import StepWatch
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


def test_a_job_that_a_failed_engine_does_not_end_holds_nothing_up(
    harness: Harness, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "MAX_S", 0.05)
    harness.engine.on_cancel = lambda job, cause: None
    job, _ = harness.submit(1)
    harness.engine.has_failed = True
    assert ended.wait(60)
    assert job.abort is AbortCause.DRAIN
    harness.finish(job, FinishReason.CANCELLED, Code.DRAINING)  # the harness waits for it


# ── an engine that hangs ─────────────────────────────────────────────────────────────────────────


class Steps:
    """An engine as ``StepWatch`` sees it."""

    has_failed = False

    def __init__(self) -> None:
        self.step_under_way: StepUnderWay | None = None


@for_each(("usual_s", "limit_s"), [(0.02, 60), (3.0, 150), (0.0, 600)])
def test_a_step_has_hung_when_it_takes_far_longer_than_any(usual_s: float, limit_s: float) -> None:
    clock, engine = ManualClock(), Steps()
    watch = StepWatch(60.0, clock.now)
    engine.step_under_way = StepUnderWay(0.0, usual_s)
    stuck = []
    while not watch.has_hung:
        clock.advance(0.5)
        watch.look(engine)  # type: ignore[arg-type]
        stuck.append(watch.stuck_s)
    passed_s = clock.now() - 100.0
    assert limit_s < passed_s <= limit_s + 2
    told_at = 0.5 * next(at for at, stuck_s in enumerate(stuck) if stuck_s)
    assert told_at == pytest.approx(limit_s / 6, abs=2), "who sends work is told long before"


@for_each(("usual_s", "told_s"), [(0.02, 1.0), (0.3, 2.5), (0.0, 100.0)])
def test_a_gpus_step_is_told_of_within_two_seconds_where_steps_are_short(
    usual_s: float, told_s: float
) -> None:
    clock, engine = ManualClock(), Steps()
    watch = StepWatch(60.0, clock.now, on_gpu=True)
    engine.step_under_way = StepUnderWay(0.0, usual_s)
    while not watch.stuck_s:
        clock.advance(failure.LOOK_S)
        watch.look(engine)  # type: ignore[arg-type]
    passed_s = clock.now() - 100.0
    assert told_s < passed_s < told_s + 0.75
    assert not watch.has_hung, "that takes as long as anywhere"


def test_another_step_and_none_at_all_begin_the_count_again() -> None:
    clock, engine = ManualClock(), Steps()
    watch = StepWatch(60.0, clock.now)
    for at in range(10):
        engine.step_under_way = None if at == 5 else StepUnderWay(at, 0.02)
        for _ in range(100):
            clock.advance(0.5)
            watch.look(engine)  # type: ignore[arg-type]
    assert not watch.has_hung and watch.stuck_s > 0


def test_no_step_has_hung_where_the_process_stood_still_as_a_whole() -> None:
    clock, engine = ManualClock(), Steps()
    watch = StepWatch(60.0, clock.now)
    engine.step_under_way = StepUnderWay(0.0, 0.02)
    for _ in range(5):
        clock.advance(1000.0)
        watch.look(engine)  # type: ignore[arg-type]
    assert not watch.has_hung and not watch.stuck_s


def test_a_process_whose_interpreter_is_held_for_ever_is_ended() -> None:
    program = (
        "import ctypes, time\n"
        "from worker.service.failure import ProcessGuard\n"
        "guard = ProcessGuard(0.3, time.monotonic)\n"
        "guard.advance()\n"
        "ctypes.PyDLL(None).usleep(60_000_000)  # keeps the lock\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50)
    assert done.returncode == 1
    assert b"ctypes.PyDLL" in done.stderr or b"line 5" in done.stderr
