"""Processes that die: whatever was in flight ends cleanly, and nothing is left behind."""

import asyncio
import os
import signal
from collections.abc import Iterator

import aiohttp
import pytest

from tests.e2e.conftest import Stack, stack_of
from tests.support.processes import eventually
from tests.support.sse import read_events
from tests.support.stack import Orchestrator, Triton, asked, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENDLESS = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


@pytest.mark.usefixtures("idle_afterwards")
def test_wp3_an_orchestrator_that_is_killed_has_its_work_stopped(paced: Stack) -> None:
    """WP-3: kill -9 of an orchestrator with 16 jobs; another one sees them gone from the worker."""
    doomed = Orchestrator(paced.triton.grpc)
    with running(doomed):
        for _ in range(16):
            assert asked(f"{doomed.url}/v2/tasks", ENDLESS)[0] == 202
        eventually(
            lambda: paced.orchestrator.metric("tidegate_worker_jobs", kind="running") == 16,
            "all jobs to run",
        )
        doomed.kill()
        paced.assert_idle()


@pytest.fixture(scope="module")
def own() -> Iterator[Stack]:
    """A stack that the test breaks, and leaves well for the next one."""
    yield from stack_of(Triton(engine="synthetic-paced"))


@pytest.mark.parametrize(("victim", "on_deadline"), [("server", "error"), ("stub", "partial")])
async def test_a_killed_worker_is_a_clean_error_and_not_ready(
    own: Stack, victim: str, on_deadline: str
) -> None:
    """A stream in flight ends with one terminal error, or with what there is where its client takes
    that (DL-6); ready turns 503; a new Triton heals it."""
    async with aiohttp.ClientSession(own.url) as http:
        async with http.post("/v2/tasks", json=ENDLESS | {"on_deadline": on_deadline}) as response:
            task = await response.json()
        kinds: list[str] = []
        async with http.get(task["events_url"]) as stream:
            async for event in read_events(stream):
                kinds.append(event.event)
                if kinds.count("token") == 3 and event.event == "token":
                    pids = {"server": own.triton.server_pid, "stub": own.triton.stub_pid}
                    os.kill(pids[victim], signal.SIGKILL)
        if on_deadline == "error":
            assert kinds[-1] == "error" and kinds.count("error") == 1
            assert event.json()["code"] == "instance_lost" and event.json()["retryable"] is True
        else:
            assert kinds[-1] == "end" and event.json()["finish_reason"] == "deadline"
            assert event.json()["usage"]["completion_tokens"] == kinds.count("token") >= 3

        async with http.post("/v1/completions", json=ENDLESS) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
    await asyncio.to_thread(
        eventually, lambda: own.orchestrator.status("/health/ready") == 503, "ready to turn 503"
    )
    assert own.orchestrator.status("/health/live") == 200
    # As a supervisor does that has found the instance lost.
    await asyncio.to_thread(own.triton.stop, 0.0)
    await asyncio.to_thread(own.triton.start)
    await asyncio.to_thread(
        eventually, lambda: own.orchestrator.status("/health/ready") == 200, "the lane to return"
    )
    status, told = await asyncio.to_thread(
        asked, f"{own.url}/v1/completions", ENDLESS | {"max_tokens": 4}
    )
    assert status == 200, told
    await asyncio.to_thread(own.assert_idle)
