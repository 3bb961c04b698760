"""Tasks on the real Triton and the demo model: replayed, and many at once."""

import asyncio

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.sse import events_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}


@pytest.fixture
def stack(demo: Stack) -> Stack:
    return demo


@pytest.mark.slow
async def test_wk1_64_concurrent_streams_with_every_token_accounted_for(
    demo: Stack, http: aiohttp.ClientSession
) -> None:
    """WK-1, WK-9: streams of different lengths at once; each gets exactly its own tokens."""

    async def stream(number: int) -> int:
        body = STORY | {"max_tokens": 8 + number % 17, "ignore_eos": True, "seed": number}
        async with http.post("/v2/tasks", json=body) as response:
            task = await response.json()
        events = await events_of(http, task["events_url"])
        tokens = [event.json() for event in events if event.event == "token"]
        assert [token["index"] for token in tokens] == list(range(8 + number % 17))
        assert events[-1].json()["usage"]["completion_tokens"] == len(tokens)
        return len(tokens)

    before = demo.orchestrator.metric("tidegate_worker_tokens_total")
    counts = await asyncio.gather(*(stream(number) for number in range(64)))
    assert counts == [8 + number % 17 for number in range(64)]
    demo.assert_idle()
    after = demo.orchestrator.metric("tidegate_worker_tokens_total")
    assert after - before == sum(counts)
