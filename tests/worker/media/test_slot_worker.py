"""What a client of the slot model is answered, over stages that do what a test says."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.triton_calls import FakeResponder
from tests.worker.media.fakes import CPU, SIZES, Rig
from worker.media.budgets import Stage
from worker.media.buffers import BufferPool
from worker.media.memory import MemoryGuard, Resident
from worker.media.settings import SlotSettings
from worker.protocol import Code
from worker.protocol.slot import SlotState
from worker.service.call import Call, strings
from worker.service.slot import SlotWorker
from worker.service.slot_state import SlotReporter

RECIPE = {"schema": "1.0", "text": "Good morning", "video": {"fps": 12}}


class Served:
    """A slot worker over ``Rig``'s stages, with buffers for one clip."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.pool = BufferPool(SIZES, 1, CPU)
        settings = SlotSettings(device="cpu", size=64, seconds=5, buffer_s=0.1, slots=1)
        guard = MemoryGuard(lambda: 7, hard=100)
        reporter = SlotReporter(settings, self.rig.pipeline.times, guard, [Resident("a model", 5)])
        self.worker = SlotWorker(self.rig.pipeline, self.pool, settings, reporter)
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


def test_the_state_is_told_until_nobody_listens(served: Served) -> None:
    served.ask().wait_final()
    watching = served.ask({}, watch=True)
    watching.wait(lambda: len(watching.sent) >= 2, "a second state")
    told = events(watching)[0]
    assert told.pop("event") == "state"
    state = json.loads(json.dumps(told))
    assert set(state) == set(SlotState.__struct_fields__)
    assert (state["slots_total"], state["slots_free"], state["waiting"]) == (1, 1, 0)
    assert state["max_size"] == 64 and state["free_in_s"] == []
    assert state["stages"]["video"]["finished"] == 1 and state["stages"]["video"]["p95_ms"] > 0
    assert state["residents"] == [{"name": "a model", "bytes": 5, "precision": ""}]
    assert state["memory_used_bytes"] == 7 and state["memory_hard_bytes"] == 100
    assert state["providers"]["audio"] == [state["stages"]["audio"]["provider"]]
    watching.cancelled = True
    watching.wait_final()
    assert watching.error is not None and watching.error[0] == Code.CANCELLED


def test_previews_show_the_portrait_and_the_video(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av", reason="previews are encoded by PyAV: tidegate[slot]")
    import av

    monkeypatch.setattr("worker.service.slot_answers._PREVIEW_S", 0.0)
    # The one thread has encoded the portrait before the video begins.
    served.rig.fakes[Stage.VIDEO].hook = lambda step: served.worker._previews.submit(int).result()
    responder = served.ask(preview=True)
    responder.wait_final()
    assert events(responder)[-1]["event"] == "result"
    shown = [(json.loads(t["event"][0]), t["preview"]) for t in responder.sent if "preview" in t]
    assert [event["stage"] for event, _ in shown][:2] == ["image", "video"]
    for event, jpeg in shown:
        codec = av.CodecContext.create("mjpeg", "r")
        (frame,) = codec.decode(av.Packet(jpeg.tobytes()))
        pixels = frame.to_ndarray(format="rgb24")
        assert pixels.shape == (64, 64, 3) and event["event"] == "stage"
        grey = 64 if event["stage"] == "image" else 100
        assert np.abs(pixels.astype(int) - grey).max() <= 3
    without = served.ask()
    without.wait_final()
    assert not any("preview" in tensors for tensors in without.sent)
