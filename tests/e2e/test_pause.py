"""A pause over a real Triton lane: the batch goes on without the job, and it with the same text."""

import pytest

from protocol import FinishReason, Sampling
from tests.e2e.conftest import Stack
from tests.orchestrator.lanes.test_lane import lane_to, submit

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.slow]

PROMPT = [10, 20, 30, 40]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=300, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=300, temperature=0.9, seed=7, frequency_penalty=0.3, ignore_eos=True),
    ],
    ids=["greedy", "drawn"],
)
async def test_a_paused_job_goes_on_with_the_same_text(demo: Stack, sampling: Sampling) -> None:
    async with lane_to(demo.triton.grpc) as (lane, whole):
        assert whole.card_can_pause
        submit(lane, whole, PROMPT, sampling)
        await whole.until(lambda: whole.end is not None)
    async with lane_to(demo.triton.grpc) as (lane, news):
        with demo.slowed():
            handle = submit(lane, news, PROMPT, sampling)
            for times in (1, 2):
                so_far = len(news.ids)
                await news.until(lambda known=so_far: len(news.ids) > known + 20)  # type: ignore[misc]
                lane.pause(handle)
                await news.until(lambda n=times: news.told.count("paused") == n)  # type: ignore[misc]
                assert news.end is None, "it was over before it could be paused"
                lane.resume(handle)
                await news.until(lambda n=times: news.told.count("resumed") == n)  # type: ignore[misc]
        await news.until(lambda: news.end is not None)
        assert news.end is not None and news.end.reason is FinishReason.LENGTH
        assert news.ids == whole.ids
