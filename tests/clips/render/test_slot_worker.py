"""What a client of the slot model is answered, over stages that do what a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from clips.plan.budgets import ClipStage, StageBudget
from clips.render import worker as clip
from clips.render.buffers import BufferPool
from clips.render.encode import ClipOutputs
from clips.render.stages.base import Step
from clips.render.worker import ClipWorker
from protocol import Code
from tests.clips.render.fakes import CPU, SIZES, Rig, raising, stepping_on
from tests.support.clock import MovedClock
from tests.support.triton_calls import FakeResponder
from worker.errors import DeviceLost
from worker.service.call import Call, strings

RECIPE = {"schema": "1.0", "text": "Good morning", "video": {"fps": 12}}


class Served:
    """A clip worker over ``Rig``'s stages, with buffers for one clip."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.pool = BufferPool(SIZES, 1, CPU)
        self.ended = threading.Event()
        self.worker = ClipWorker(self.rig.pipeline, self.pool, die=self.ended.set)
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


def told(served: Served) -> dict[str, Any]:
    """What it says of itself to those who watch."""
    watching = served.ask({}, watch=True)
    watching.wait(lambda: watching.sent, "a state")
    watching.cancelled = True
    watching.wait_final()
    return events(watching)[0]


def test_how_long_buffers_take_to_be_free_is_told_by_cause(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    video, times = served.rig.fakes[ClipStage.VIDEO], served.rig.times[ClipStage.VIDEO]
    assert told(served)["aborts"] == {}
    video.hook = stepping_on
    cancelled = served.ask()
    cancelled.wait(
        lambda: any(event.get("stage") == "video" for event in events(cancelled)), "the video"
    )
    cancelled.cancelled = True
    assert cancelled.refusal() == (Code.CANCELLED, "cancelled")
    clock = MovedClock()
    for module in ("worker", "pipeline", "clip", "stage_runner"):
        monkeypatch.setattr(f"clips.render.{module}.time", SimpleNamespace(monotonic=clock))

    def let_the_deadline_pass(step: Step) -> None:
        clock.passed_s += 60
        stepping_on(step)

    video.hook = let_the_deadline_pass
    late = served.ask(deadline_ms=60_000)
    assert late.refusal()[1] == "video: the deadline came"
    assert events(late)[-1]["event"] == "saved"
    video.hook = stepping_on
    times.budget = StageBudget(0.001, 0.02)
    slow = served.ask()
    assert "took longer than" in slow.refusal()[1]
    aborts = told(served)["aborts"]
    assert {cause: each["count"] for cause, each in aborts.items()} == {
        "cancelled": 1,
        "deadline": 1,
        "timeout": 1,
    }
    assert all(0 <= each["p50_ms"] <= each["p99_ms"] for each in aborts.values())


def test_what_a_broken_stage_left_is_not_there_for_the_next_clip(served: Served) -> None:
    served.rig.fakes[ClipStage.VIDEO].hook = raising(RuntimeError("device-side assert"))
    broken = served.ask()
    assert "video: RuntimeError" in broken.refusal()[1]
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

    for runner in served.rig.pipeline.runners.values():
        runner._check_device = lost
    waiting = threading.Event()

    def break_down(step: Step) -> None:
        assert waiting.wait(60)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    served.rig.fakes[ClipStage.VIDEO].hook = break_down
    broken, other = served.ask(), served.ask()
    waiting.set()
    for responder, code in ((broken, Code.INSTANCE_LOST), (other, Code.CANCELLED)):
        assert responder.refusal()[0] is code
    assert served.ended.wait(60)
    late = served.ask()
    assert late.refusal()[0] is Code.DRAINING


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
    assert first.refusal()[0] == Code.CANCELLED
    monkeypatch.undo()
    served.ask().wait_final()


def test_dl17_a_clip_that_keeps_on_is_rendered_though_it_is_sure_to_be_late(served: Served) -> None:
    for _ in range(2):  # an hour for next to no work
        served.rig.times[ClipStage.VIDEO].observe(3600.0, 1e-3)
    stopped = served.ask(deadline_ms=60_000)
    code, message = stopped.refusal()
    assert code == Code.DEADLINE_EXCEEDED and "at the least" in message
    spared = served.ask(deadline_ms=60_000, keep_on=True)
    spared.wait_final()
    assert spared.error is None
    result = events(spared)[-1]
    assert result["event"] == "result" and result["spared"] is True and result["deadline_met"]
    assert result["check"]["models"][0] == {"model": "a", "scores": [0.9] * 5}
    assert told(served)["stages"]["video"]["least"] > 0
