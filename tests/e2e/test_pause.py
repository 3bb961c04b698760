"""A pause over a real Triton lane: the batch continues without the job, which keeps its text."""

import pytest

from protocol import FinishReason, Sampling
from tests.e2e.conftest import Stack
from tests.support.lanes import News, lane_to, submit

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.slow]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=300, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=300, temperature=0.9, seed=7, frequency_penalty=0.3, ignore_eos=True),
    ],
    ids=["greedy", "drawn"],
)
async def test_a_paused_job_goes_on_with_the_same_text(demo: Stack, sampling: Sampling) -> None:
    async with lane_to(demo.triton.grpc) as (lane, owner):
        assert owner.card is not None and owner.card.can_pause
        whole, news = News(), News()
        submit(lane, whole, sampling)
        await whole.until(lambda: whole.is_over)
        with demo.slowed():
            handle = submit(lane, news, sampling)
            for times in (1, 2):
                so_far = len(news.ids)
                await news.until(lambda known=so_far: len(news.ids) > known + 20)  # type: ignore[misc]
                lane.pause(handle)
                await news.until(lambda n=times: news.paused == n)  # type: ignore[misc]
                assert not news.is_over, "it was over before it could be paused"
                lane.resume(handle)
                await news.until(lambda n=times: news.resumed == n)  # type: ignore[misc]
        await news.until(lambda: news.is_over)
        assert news.end.reason is FinishReason.LENGTH
        assert news.ids == whole.ids
