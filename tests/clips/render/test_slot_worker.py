"""What a client of the slot model is answered, over stages that do what a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from clips.plan.budgets import ClipStage, StageBudget
from clips.render import worker as clip
from clips.render.answers import ClipOutputs
from clips.render.buffers import BufferPool
from clips.render.memory import CountedMemory, clip_guard
from clips.render.reporter import ClipReporter
from clips.render.settings import RenderSettings
from clips.render.stages.base import Step
from clips.render.worker import ClipWorker
from protocol import Code
from tests.clips.render.fakes import CPU, SIZES, Rig
from tests.support.clock import MovedClock
from tests.support.triton_calls import FakeResponder
from worker.errors import DeviceLost
from worker.memory import MemoryLimits
from worker.service.call import Call, strings

RECIPE = {"schema": "1.0", "text": "Good morning", "video": {"fps": 12}}


class Served:
    """A clip worker over ``Rig``'s stages, with buffers for one clip."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.pool = BufferPool(SIZES, 1, CPU)
        settings = RenderSettings(device="cpu", size=64, seconds=5, buffer_s=0.1, slots=1)
        guard = clip_guard(CountedMemory(lambda: 7), MemoryLimits(hard_bytes=100))
        reporter = ClipReporter(
            settings, self.rig.pipeline.providers, self.rig.pipeline.times, guard
        )
        self.ended = threading.Event()
        self.worker = ClipWorker(
            self.rig.pipeline, self.pool, settings, reporter, die=self.ended.set
        )
        self.worker.start()

    def ask(self, recipe: dict[str, Any] | None = None, **parameters: Any) -> FakeResponder:
        responder = FakeResponder()
        data = json.dumps(RECIPE if recipe is None else recipe)
        inputs = {"recipe": strings(data)}
        self.worker.accept(Call(inputs, {"outputs": "", **parameters}, "", responder))
        return responder


def events(responder: FakeResponder) -> list[dict[str, Any]]:
    return [json.loads(tensors["event"][0]) for tensors in responder.sent]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.worker.close()
    assert served.pool.free == 1


def _aborts(served: Served) -> dict[str, Any]:
    watching = served.ask({}, watch=True)
    watching.wait(lambda: watching.sent, "a state")
    watching.cancelled = True
    watching.wait_final()
    aborts: dict[str, Any] = events(watching)[0]["aborts"]
    return aborts


def _stepping_on(step: Step) -> None:
    while True:
        step(0.5)


def test_how_long_buffers_take_to_be_free_is_told_by_cause(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    video, times = served.rig.fakes[ClipStage.VIDEO], served.rig.times[ClipStage.VIDEO]
    assert _aborts(served) == {}
    video.hook = _stepping_on
    cancelled = served.ask()
    cancelled.wait(
        lambda: any(event.get("stage") == "video" for event in events(cancelled)), "the video"
    )
    cancelled.cancelled = True
    cancelled.wait_final()
    assert cancelled.error == (Code.CANCELLED, "cancelled")
    clock = MovedClock()
    for module in ("worker", "pipeline", "rendering", "stage_runner"):
        monkeypatch.setattr(f"clips.render.{module}.time", SimpleNamespace(monotonic=clock))

    def let_the_deadline_pass(step: Step) -> None:
        clock.passed_s += 60
        _stepping_on(step)

    video.hook = let_the_deadline_pass
    late = served.ask(deadline_ms=60_000)
    late.wait_final()
    assert late.error is not None and late.error[1] == "video: the deadline came"
    assert events(late)[-1]["event"] == "saved"
    video.hook = _stepping_on
    times._budget = StageBudget(0.001, 0.02)
    slow = served.ask()
    slow.wait_final()
    assert slow.error is not None and "took longer than" in slow.error[1]
    aborts = _aborts(served)
    assert {cause: each["count"] for cause, each in aborts.items()} == {
        "cancelled": 1,
        "deadline": 1,
        "timeout": 1,
    }
    assert all(0 <= each["p50_ms"] <= each["p99_ms"] for each in aborts.values())


def test_what_a_broken_stage_left_is_not_there_for_the_next_clip(served: Served) -> None:
    def break_down(step: Step) -> None:
        raise RuntimeError("device-side assert")

    served.rig.fakes[ClipStage.VIDEO].hook = break_down
    broken = served.ask()
    broken.wait_final()
    assert broken.error is not None and "video: RuntimeError" in broken.error[1]
    lease = served.pool.lease()
    assert lease is not None
    with lease:
        assert not lease.audio(SIZES.samples).any() and not lease.actor(64).any()
    served.rig.fakes[ClipStage.VIDEO].hook = lambda step: None
    after = served.ask()
    after.wait_final()
    assert events(after)[-1]["event"] == "result"


def test_a_lost_device_ends_the_process_once_every_clip_was_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each clip that came would fail within a moment, and the worker draw all of them."""
    monkeypatch.setattr(clip, "LAST_WORDS_S", 0.02)

    def lost() -> None:
        raise DeviceLost("the device computes nothing any more")

    for runner in served.rig.pipeline._runners.values():
        runner._check_device = lost
    waiting = threading.Event()

    def break_down(step: Step) -> None:
        assert waiting.wait(60)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    served.rig.fakes[ClipStage.VIDEO].hook = break_down
    broken, other = served.ask(), served.ask()
    waiting.set()
    for responder, code in ((broken, Code.INSTANCE_LOST), (other, Code.CANCELLED)):
        responder.wait_final()
        assert responder.error is not None and responder.error[0] is code
    assert served.ended.wait(60)
    late = served.ask()
    late.wait_final()
    assert late.error is not None and late.error[0] is Code.DRAINING


def test_a_cancelled_clip_is_encoded_no_further(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds, of a long clip, in which its buffers were nobody's."""
    encoding = threading.Event()

    def encode(names: object, clip: object, go_on: Callable[[], None]) -> ClipOutputs:
        encoding.set()
        while True:
            go_on()

    monkeypatch.setattr("clips.render.worker.outputs_of", encode)
    first = served.ask()
    assert encoding.wait(60)
    first.cancelled = True
    first.wait_final()
    assert first.error is not None and first.error[0] == Code.CANCELLED
    monkeypatch.undo()
    served.ask().wait_final()


def test_dl17_a_clip_that_keeps_on_is_rendered_though_it_is_sure_to_be_late(served: Served) -> None:
    for _ in range(2):  # an hour for next to no work
        served.rig.times[ClipStage.VIDEO].observe(3600.0, 1e-3)
    stopped = served.ask(deadline_ms=60_000)
    stopped.wait_final()
    assert stopped.error is not None and stopped.error[0] == Code.DEADLINE_EXCEEDED
    assert "at the least" in stopped.error[1]
    spared = served.ask(deadline_ms=60_000, keep_on=True)
    spared.wait_final()
    assert spared.error is None
    result = events(spared)[-1]
    assert result["event"] == "result" and result["spared"] is True and result["deadline_met"]
    watching = served.ask({}, watch=True)
    watching.wait(lambda: watching.sent, "a state")
    watching.cancelled = True
    watching.wait_final()
    least = events(watching)[0]["stages"]["video"]["least"]
    assert least > 0
