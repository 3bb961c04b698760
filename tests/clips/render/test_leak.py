"""A hundred clips leave nothing behind (SL-3)."""

import gc
import json

import pytest

from clips.render.build import build_clips
from clips.render.settings import RenderSettings
from clips.render.worker import ClipWorker
from tests.support.triton_calls import FakeResponder
from worker.runner.memory import ProcessMemory
from worker.service.call import Call, strings

pytestmark = pytest.mark.slow

MAX_GROWTH = 100_000_000


def _render(worker: ClipWorker, count: int) -> None:
    """``count`` clips, two at a time, every tenth of which is cancelled."""
    for first in range(0, count, 2):
        responders = [FakeResponder(), FakeResponder()]
        for number, responder in enumerate(responders, first):
            recipe = {
                "schema": "1.0",
                "text": "Hi.",
                "portrait": {"seed": number},
                "video": {"fps": 6, "size": 64, "seconds": 0.6},
            }
            inputs = {"recipe": strings(json.dumps(recipe))}
            parameters = {"outputs": "mp4,wav,png,video"}
            worker.accept(Call(inputs, parameters, "", responder))
            responder.cancelled = number % 10 == 9
        for responder in responders:
            responder.wait_final()
            assert responder.cancelled or responder.error is None, responder.error


def _taken() -> int:
    gc.collect()
    return ProcessMemory().used_bytes()


def test_a_hundred_clips_grow_by_less_than_100_mb() -> None:
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    settings = RenderSettings(device="cpu", size=64, seconds=1, slots=2, buffer_s=0)
    worker = build_clips(settings)
    worker.start()
    try:
        _render(worker, 10)  # libraries, threads, caches
        before = _taken()
        _render(worker, 100)
        grown = _taken() - before
    finally:
        worker.close()
    assert grown < MAX_GROWTH, f"{grown / 1e6:.0f} MB"
    print(f"grown by {grown / 1e6:.1f} MB")
