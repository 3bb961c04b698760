"""What is copied of a clip on its way."""

from collections import Counter

import pytest
import torch

from clips.render.check import KEYFRAMES
from perf.clips.throughput import SPEC
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


@pytest.mark.slow
async def test_between_stages_nothing_but_the_keyframes_is_copied() -> None:
    """SL-3: views of the buffers, from recipe to clip."""
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    ours = await copied_between_stages()
    assert ours["copied"] == KEYFRAMES * 3 * SPEC.size**2
    assert ours["allocated"] == 0
