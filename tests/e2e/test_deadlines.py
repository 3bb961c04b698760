"""DL-3, DL-5, DL-6, DL-10 and DL-14 on the real Triton: during, mid-stream, at the end."""

import aiohttp
import pytest

from protocol import Outcome
from tests.e2e.conftest import Stack
from tests.support.sse import events_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True}
"""At 20 ms a step these take ten seconds."""


@pytest.fixture
def stack(paced: Stack) -> Stack:
    return paced


def outcomes(stack: Stack) -> dict[Outcome, float]:
    metric = stack.orchestrator.metric
    return {outcome: metric("tidegate_outcomes_total", outcome=outcome) for outcome in Outcome}


async def test_dl5_missed_mid_stream_is_a_terminal_error_event(http: aiohttp.ClientSession) -> None:
    body = LONG | {"ignore_eos": False, "deadline_ms": 1500}
    async with http.post("/v2/tasks", json=body) as response:
        task = await response.json()
    events = await events_of(http, task["events_url"])
    kinds = [event.kind for event in events]
    assert kinds.count("token") >= 1
    assert kinds[-1] == "error" and kinds.count("error") == 1 and "end" not in kinds
    assert events[-1].data["code"] == "deadline_exceeded"


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
    assert events[-1].kind == "end"
    end = events[-1].data
    assert (end["outcome"], end["finish_reason"]) == ("partial", "deadline")
    assert end["usage"]["completion_tokens"] == sum(e.kind == "token" for e in events) > 0
    assert "left_ms" in end["budget"]  # how much is for tests with a clock of their own


async def test_dl14_a_late_first_token_ends_it_and_a_late_gap_does_not(
    http: aiohttp.ClientSession,
) -> None:
    """DL-14, DL-7: at 20 ms a step nothing comes within 15 ms, and no token 5 ms after another."""
    async with http.post("/v1/completions", json=LONG | {"first_token_ms": 15}) as response:
        assert response.status == 504
        assert (await response.json())["error"]["part"] == "first_token"
    body = LONG | {"max_tokens": 5, "token_gap_ms": 5}
    headers = {"x-llm-d-slo-ttft-ms": "60000"}
    async with http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200  # all of it was there before the schedule began
        assert "missed_part" not in await response.json()
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status == 504:  # its steps are known by now
            assert answer["error"]["part"] == "token_gap"
            return
        assert response.headers["X-Deadline-Missed-Part"] == "token_gap"
    assert answer["missed_part"] == "token_gap"
    assert answer["usage"]["completion_tokens"] == 5
