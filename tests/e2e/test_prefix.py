"""The prefix cache of a real Triton, seen from a lane."""

import asyncio
import shutil
from pathlib import Path

import pytest

from orchestrator.lanes import Lane
from protocol import Sampling
from tests.support.lanes import News, lane_to, submit
from tests.support.stack import Triton, started

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

IDS = [7 + i % 90 for i in range(100)]


async def run(lane: Lane, ids: list[int], *, session: str = "") -> News:
    news = News()
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    submit(lane, news, sampling, prompt=ids, session=session)
    async with asyncio.timeout(60):
        await news.until(lambda: news.is_over)
    return news


@pytest.mark.slow
async def test_wk6_a_conversation_goes_on_after_triton_was_restarted(tmp_path: Path) -> None:
    """WK-6, WK-5: SIGTERM saves what is left to save; the next worker finds it."""
    disk = shutil.disk_usage(tmp_path)
    if disk.free < 0.21 * (disk.used + disk.free):
        pytest.skip("a fifth of this disk must stay free, so nothing is saved on it")
    triton = Triton(kv__disk_path=tmp_path)
    with started(triton):
        async with lane_to(triton.grpc) as (lane, _):
            first = await run(lane, IDS, session="chat")
            more = [*IDS, *first.ids, *IDS[:20]]
            before = await run(lane, more)
        triton.stop()
        triton.start()
        async with lane_to(triton.grpc) as (lane, _):
            after = await run(lane, more, session="chat")
    assert after.end.cached_tokens == 96
    assert after.ids == before.ids
