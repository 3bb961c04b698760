"""DL-3, DL-5, DL-6, DL-10 and DL-14 on the real Triton: during, mid-stream, at the end."""

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.sse import events_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True}
"""At 20 ms a step these take ten seconds."""


@pytest.fixture
def stack(paced: Stack) -> Stack:
    return paced


async def test_dl3_certain_work_that_no_longer_fits_stops_at_once(
    http: aiohttp.ClientSession,
) -> None:
    """DL-3: 500 tokens that must come need 10 s; with 5 s left nobody waits for the deadline."""
    warm = LONG | {"max_tokens": 8}
    async with http.post("/v1/completions", json=warm) as response:
        assert response.status == 200
    async with http.post("/v1/completions", json=LONG | {"deadline_ms": 5000}) as response:
        assert response.status == 504
        assert "X-Deadline-Exceeded-By-Ms" not in response.headers, "it was waited for"


async def test_dl6_partial_ends_cleanly_before_the_deadline(http: aiohttp.ClientSession) -> None:
    body = LONG | {"deadline_ms": 1500, "on_deadline": "partial"}
    async with http.post("/v2/tasks", json=body) as response:
        task = await response.json()
    events = await events_of(http, task["events_url"])
    assert events[-1].event == "end"
    end = events[-1].json()
    assert (end["outcome"], end["finish_reason"]) == ("partial", "deadline")
    assert end["usage"]["completion_tokens"] == sum(e.event == "token" for e in events) > 0
    assert "left_ms" in end["budget"]  # how much is for tests with a clock of their own
