"""An orchestrator that knows a real Triton by its plain contract alone, as it knows other people's
LLM backends: the same texts as over lanes, and the worker itself shows what a cancel stops."""

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from catalog.paths import DEMO_CHECKPOINT
from tests.e2e.conftest import Stack
from tests.support.stack import Orchestrator, Triton, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

ASKED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


def entry(triton: Triton) -> str:
    return f"triton+grpc://{triton.grpc}/llm?tokenizer={DEMO_CHECKPOINT}&alias=demo&name=plain"


@pytest.fixture(scope="module")
def plain_demo(demo: Stack) -> Iterator[Orchestrator]:
    orchestrator = Orchestrator(entry(demo.triton))
    orchestrator.start()
    try:
        yield orchestrator
    finally:
        assert orchestrator.stop() == 0


async def complete(url: str, **more: object) -> tuple[int, dict[str, object]]:
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json=ASKED | more) as response,
    ):
        return response.status, await response.json()


async def test_texts_are_those_of_a_lane(demo: Stack, plain_demo: Orchestrator) -> None:
    _, over_lane = await complete(demo.url)
    _, over_plain = await complete(plain_demo.url)
    assert over_plain["choices"] == over_lane["choices"]
    details = ("prompt_tokens", "completion_tokens", "total_tokens")
    usages = [answer["usage"] for answer in (over_plain, over_lane)]
    told = [{name: usage[name] for name in details} for usage in usages]  # type: ignore[index]
    assert told[0] == told[1]


async def test_a_closed_stream_stops_the_workers_job(demo: Stack, plain_demo: Orchestrator) -> None:
    body = ASKED | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    with demo.slowed():
        async with aiohttp.ClientSession(plain_demo.url) as http:
            response = await http.post("/v1/completions", json=body)
            await response.content.readuntil(b"\n\n")
            runs = demo.orchestrator.metric
            await asyncio.to_thread(
                eventually,
                lambda: runs("tidegate_worker_jobs", kind="running") == 1,
                "the job to run",
            )
            response.close()
            await asyncio.to_thread(
                eventually, lambda: runs("tidegate_worker_jobs") == 0, "the worker's job to stop"
            )
