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


async def test_native_task_streams_and_replays(http: aiohttp.ClientSession) -> None:
    """OR-1: queued? started token* end, one terminal event, and the same again afterwards."""
    async with http.post("/v2/tasks", json=STORY) as response:
        assert response.status == 202
        task = await response.json()
    events = await events_of(http, task["events_url"])
    kinds = [event.kind for event in events]
    assert kinds[-1] == "end" and kinds.count("end") == 1 and "error" not in kinds
    assert kinds.index("started") < kinds.index("token")
    tokens = [event.data for event in events if event.kind == "token"]
    assert len(tokens) == 24
    assert [token["index"] for token in tokens] == list(range(24))
    end = events[-1].data
    assert (end["outcome"], end["finish_reason"]) == ("met", "length")
    assert end["usage"]["completion_tokens"] == 24

    async with http.get(f"/v2/tasks/{task['task_id']}") as response:
        status = await response.json()
    assert status["status"] == "ended"
    assert status["text"] == "".join(token["text"] for token in tokens)
    again = await events_of(http, task["events_url"], last_event_id=events[3].id)
    assert [event.id for event in again] == [event.id for event in events[4:]]
    assert again[-1].data == end


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
        tokens = [event.data for event in events if event.kind == "token"]
        assert [token["index"] for token in tokens] == list(range(8 + number % 17))
        assert events[-1].data["usage"]["completion_tokens"] == len(tokens)
        return len(tokens)

    before = demo.orchestrator.metric("tidegate_worker_tokens_total")
    counts = await asyncio.gather(*(stream(number) for number in range(64)))
    assert counts == [8 + number % 17 for number in range(64)]
    demo.assert_idle()
    after = demo.orchestrator.metric("tidegate_worker_tokens_total")
    assert after - before == sum(counts)
