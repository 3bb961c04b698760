"""OR-10 on the real thing: a text whose Triton is killed continues to the letter on another."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.support.processes import eventually
from tests.support.sse import events_of, read_events
from tests.support.stack import Orchestrator, Triton, running, started
from tests.support.triton_models import write_slow_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = ("The old sailor", "Once upon a time", "A small fox")
SAMPLINGS: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.4, "stop": ["\n\n\n"]},
)


@dataclass
class Pair:
    tritons: tuple[Triton, ...]
    orchestrator: Orchestrator
    slow: Path
    """While this is there, each step takes 30 ms longer."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    slow = tmp_path / "slow"
    repository = write_slow_model(tmp_path / "models", slow)
    # In any company, and cut into prompt and answer in any way: the same tokens (WK-3).
    tritons = tuple(Triton(repository=repository, deterministic="true") for _ in range(2))
    orchestrator = Orchestrator(*(triton.grpc for triton in tritons))
    with started(*tritons), running(orchestrator):
        eventually(
            lambda: orchestrator.metric("tidegate_instance_state", state="up") == 2,
            "both instances to be up",
        )
        yield Pair(tritons, orchestrator, slow)


async def submit(http: aiohttp.ClientSession, body: dict[str, object]) -> str:
    async with http.post("/v2/tasks", json=body) as response:
        assert response.status == 202, await response.text()
        return str((await response.json())["events_url"])


async def test_or10_texts_go_on_to_the_letter_when_their_triton_is_killed(pair: Pair) -> None:
    """Greedy and seeded; no token is lost, repeated or drawn differently."""
    bodies = [
        {"model": "demo", "prompt": prompt, "max_tokens": 160, "ignore_eos": True} | sampling
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    ]
    metric = pair.orchestrator.metric
    async with aiohttp.ClientSession(pair.orchestrator.url) as http:

        async def told(url: str) -> tuple[list[int], str]:
            events = await events_of(http, url)
            assert events[-1].event == "end", events[-1]
            tokens = [event.json() for event in events if event.event == "token"]
            ids = [id for token in tokens for id in token["token_ids"]]
            return ids, "".join(token["text"] for token in tokens)

        undisturbed = [await submit(http, body) for body in bodies]
        expected = [await told(url) for url in undisturbed]
        pair.slow.touch()  # none of them may be over before the kill
        urls = [await submit(http, body) for body in bodies]
        for url in urls:
            async with http.get(url) as response:
                async for event in read_events(response):
                    if event.event == "token":
                        break
        async with http.get("/v2/instances") as response:
            load = {i["address"]: i["load"] for i in (await response.json())["instances"]}
        busiest = max(pair.tritons, key=lambda triton: int(load[triton.grpc]))
        os.kill(busiest.server_pid, signal.SIGKILL)
        pair.slow.unlink()
        assert [await told(url) for url in urls] == expected
        assert metric("tidegate_retries_total", kind="continue") >= 1
        assert (
            metric("tidegate_offered_total")
            == metric("tidegate_outcomes_total")
            == 4 * len(PROMPTS)
        )
