"""What the slot benchmarks count, and that the naive pipeline makes the same clip."""

from collections import Counter

import pytest
import torch

from clips.plan.recipe import read_recipe
from clips.render.check import KEYFRAMES
from perf.clips.naive import NaivePipeline, development_stages
from perf.clips.rig import SPEC, recipe_of
from tests.support.clip_copies import Counting, copied_between_stages


@pytest.mark.slow
def test_copies_and_allocations_are_counted_and_views_are_not() -> None:
    counts: Counter[str] = Counter()
    source = torch.ones(1000, dtype=torch.uint8)
    with Counting(counts):
        source[:500].view(50, 10).permute(1, 0)
        assert not counts
        source[:500].clone()
        source[[1, 2, 3]]
        torch.zeros(200, dtype=torch.float32).copy_(source[:200])
    assert counts == {"copied": 500 + 3 + 800, "allocated": 800}


def test_the_naive_pipeline_makes_the_clip_that_is_asked_for() -> None:
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    stages = development_stages()
    try:
        clip = NaivePipeline(stages, 64, 4.0).render(read_recipe(recipe_of("Hi.", fps=6)))
    finally:
        for provider in stages.all():
            provider.close()
    assert clip.mp4[4:8] == b"ftyp" and clip.check is not None
    assert clip.plan.size == 64 and clip.plan.frames == -(-clip.plan.samples * 6 // 24_000)
    assert set(clip.stage_ms) == {"audio", "image", "video", "clip", "total"}


@pytest.mark.slow
async def test_between_stages_nothing_but_the_keyframes_is_copied() -> None:
    """SL-3: views of the buffers, from recipe to clip."""
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    ours, naive, frames_bytes = await copied_between_stages()
    assert ours["copied"] == KEYFRAMES * 3 * SPEC.size**2
    assert ours["allocated"] == 0
    assert naive["copied"] > frames_bytes
