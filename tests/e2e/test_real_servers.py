"""Lanes against the servers themselves: llama.cpp's, where it is installed (make test-llamacpp),
and those that somebody runs with the demo checkpoint::

    REAL_SERVERS='vllm+http://127.0.0.1:8000?tokenizer=worker/demo_model/checkpoint,llamacpp+http://…'

They are big, and not what CI installs: without the variable their tests are skipped.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from orchestrator.lanes import ServerKind, kind_of
from orchestrator.lanes.endpoint import read_endpoint
from tests.support.llamacpp import demo_gguf, llamacpp_server
from tests.support.processes import PATIENCE_S
from tests.support.stack import Orchestrator

OURS = "llamacpp"
SERVERS = [OURS, *filter(None, os.environ.get("REAL_SERVERS", "").split(","))]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ASKED = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = ASKED | {"max_tokens": 1500}


@pytest.fixture(scope="module", params=SERVERS, ids=lambda entry: entry.partition("+")[0])
def entry(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An entry of ``TIDEGATE_INSTANCES``, without an alias."""
    if request.param != OURS:
        yield request.param
        return
    folder = tmp_path_factory.mktemp("llamacpp")
    with llamacpp_server(demo_gguf(folder), folder / "log") as served:
        yield served.address.partition("&alias=")[0]


@pytest.fixture
async def server(entry: str) -> AsyncIterator[tuple[str, Orchestrator]]:
    orchestrator = Orchestrator(entry + "&alias=demo")
    await asyncio.to_thread(orchestrator.start)
    yield entry, orchestrator
    assert await asyncio.to_thread(orchestrator.stop) == 0


async def complete(url: str, **body: object) -> tuple[int, dict[str, object]]:
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json={"model": "demo"} | body) as response,
    ):
        return response.status, await response.json()


async def running(entry: str) -> int:
    """Jobs that the server itself says it has."""
    kind, base = kind_of(entry), read_endpoint(entry).base_url
    async with aiohttp.ClientSession() as http:
        if kind is ServerKind.VLLM:
            async with http.get(f"{base}/metrics") as response:
                lines = (await response.text()).splitlines()
            names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
            return round(sum(float(line.split()[-1]) for line in lines if line.startswith(names)))
        async with http.get(f"{base}/slots") as response:
            return sum(bool(slot["is_processing"]) for slot in await response.json())


async def until(entry: str, holds: Callable[[int], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds(await running(entry)):
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.005)


async def test_texts_come_with_their_true_counts(server: tuple[str, Orchestrator]) -> None:
    _, orchestrator = server
    status, answer = await complete(orchestrator.url, **ASKED)
    assert status == 200, answer
    assert len(answer["choices"][0]["text"]) > 24  # type: ignore[index]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 24  # type: ignore[index]
    assert usage["prompt_tokens"] > 1  # type: ignore[index]
    again, same = await complete(orchestrator.url, **ASKED)
    assert again == 200
    assert same["choices"] == answer["choices"]


async def test_a_closed_connection_stops_the_server(server: tuple[str, Orchestrator]) -> None:
    entry, orchestrator = server
    async with aiohttp.ClientSession(orchestrator.url) as http:
        body = {"model": "demo", "stream": True} | LONG
        async with http.post("/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            await until(entry, lambda jobs: jobs > 0)
            response.close()
        await until(entry, lambda jobs: jobs == 0)
