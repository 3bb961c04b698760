"""Processes that die: whatever was in flight ends cleanly, and nothing is left behind."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.sse import read_events
from tests.support.stack import PATIENCE_S, Orchestrator, Triton, eventually, running
from tests.support.triton_models import write_breaking_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENDLESS = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


async def start_streams(url: str, count: int) -> None:
    """Start ``count`` streams and return when each has had its first token."""

    async def one(http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", json=ENDLESS | {"stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    return

    async with aiohttp.ClientSession(url) as http:
        await asyncio.gather(*(one(http) for _ in range(count)))


@pytest.mark.usefixtures("idle_afterwards")
def test_wp3_an_orchestrator_that_is_killed_has_its_work_stopped(paced: Stack) -> None:
    """WP-3: kill -9 of an orchestrator with 16 jobs; another one sees them gone from the worker."""
    doomed = Orchestrator(paced.triton.grpc)
    with running(doomed):

        async def submit() -> None:
            async with aiohttp.ClientSession(doomed.url) as http:
                for _ in range(16):
                    async with http.post("/v2/tasks", json=ENDLESS) as response:
                        assert response.status == 202

        asyncio.run(submit())
        eventually(
            lambda: paced.orchestrator.metric("tidegate_worker_jobs", kind="running") == 16,
            "all jobs to run",
        )
        doomed.kill()
        paced.assert_idle()


@dataclass
class Own(Stack):
    """A stack that the tests break, each of which leaves it well for the next one."""

    breaks: Path = Path()
    """Once this is there, the engine breaks with the next request."""

    async def start_anew(self) -> None:
        """As a supervisor would, when it has found that the instance is lost."""
        await asyncio.to_thread(self.triton.stop, 0.0)
        await asyncio.to_thread(self.triton.start)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    breaks = folder / "break"
    repository = write_breaking_model(folder / "models", breaks)
    triton = Triton(repository=repository, engine="synthetic-paced")
    try:
        triton.start()
        orchestrator = Orchestrator(triton.grpc)
        with running(orchestrator):
            yield Own(triton, orchestrator, breaks=breaks)
    finally:
        triton.close()


@pytest.mark.parametrize(("victim", "on_deadline"), [("server", "error"), ("stub", "partial")])
async def test_a_killed_worker_is_a_clean_error_and_not_ready(
    own: Own, victim: str, on_deadline: str
) -> None:
    """A stream in flight ends with one terminal error, or with what there is where its client takes
    that (DL-6); ready turns 503; a new Triton heals it."""
    async with aiohttp.ClientSession(own.url) as http:
        async with http.post("/v2/tasks", json=ENDLESS | {"on_deadline": on_deadline}) as response:
            task = await response.json()
        kinds: list[str] = []
        async with http.get(task["events_url"]) as stream:
            async for event in read_events(stream):
                kinds.append(event.kind)
                if kinds.count("token") == 3 and event.kind == "token":
                    pids = {"server": own.triton.server_pid, "stub": own.triton.stub_pid}
                    os.kill(pids[victim], signal.SIGKILL)
        if on_deadline == "error":
            assert kinds[-1] == "error" and kinds.count("error") == 1
            assert event.data["code"] == "instance_lost" and event.data["retryable"] is True
        else:
            assert kinds[-1] == "end" and event.data["finish_reason"] == "deadline"
            assert event.data["usage"]["completion_tokens"] == kinds.count("token") >= 3

        async with http.post("/v1/completions", json=ENDLESS) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
    await asyncio.to_thread(
        eventually, lambda: own.orchestrator.status("/health/ready") == 503, "ready to turn 503"
    )
    assert own.orchestrator.status("/health/live") == 200
    await own.start_anew()
    await asyncio.to_thread(
        eventually, lambda: own.orchestrator.status("/health/ready") == 200, "the lane to return"
    )
    await start_streams(own.url, 4)
    await asyncio.to_thread(own.assert_idle)


async def test_a_broken_engine_ends_its_process_so_that_its_instance_is_started_anew(
    own: Own,
) -> None:
    """Else it would refuse everything from then on, and look alive."""
    async with aiohttp.ClientSession(own.url) as http:
        async with http.post("/v2/tasks", json=ENDLESS) as response:
            task = await response.json()
        async with http.get(task["events_url"]) as stream:
            async for event in read_events(stream):
                if event.kind == "token":
                    own.breaks.touch()
                    break
        short = ENDLESS | {"max_tokens": 2}
        waits = asyncio.create_task(http.post("/v1/completions", json=short))
        async with http.get(task["events_url"]) as stream:
            events = [event async for event in read_events(stream)]
        assert [event.kind for event in events].count("error") == 1
        assert events[-1].data["retryable"] is True
        lost = await asyncio.to_thread(own.triton.wait_lost)
        assert lost == "a model's Python process ended"
        await own.start_anew()
        async with asyncio.timeout(PATIENCE_S), await waits as response:
            assert response.status == 200, "what had not begun waited for the new one"


async def test_a_drained_worker_ends_its_streams_and_triton_stops(own: Own) -> None:
    """OR-14: an open lane would keep Triton from stopping; drained, it stops with streams on."""
    async with aiohttp.ClientSession(own.url) as http:
        async with http.post("/v2/tasks", json=ENDLESS) as response:
            task = await response.json()
        async with http.get(task["events_url"]) as stream:
            kinds = []
            stopping = None
            async for event in read_events(stream):
                kinds.append(event.kind)
                if kinds.count("token") == 3 and stopping is None:
                    stopping = asyncio.create_task(asyncio.to_thread(own.triton.stop, 0.5))
        assert stopping is not None
        await stopping
    assert kinds[-1] == "error" and kinds.count("error") == 1
