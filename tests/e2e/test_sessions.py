"""WK-9: sessions on the real thing stay apart, keep their KV, and leave nothing behind."""

import asyncio

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.processes import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

AGENTS, TURNS = 10, 3


async def test_wk9_ten_agents_at_once_stay_apart_and_find_their_kv(demo: Stack) -> None:
    """After the test no block and no slot is in use; what is kept counts as free."""
    cached = demo.orchestrator.metric("tidegate_prompt_tokens_cached_total")
    async with aiohttp.ClientSession(demo.url) as http:
        totals = await asyncio.gather(*(agent(http, number) for number in range(AGENTS)))
        metric = demo.orchestrator.metric
        await asyncio.to_thread(
            eventually,
            lambda: metric("tidegate_sessions_kept") >= AGENTS,
            "the worker to say that it keeps the agents' KV",
        )
        async with http.get("/v2/sessions") as response:
            assert (await response.json())["sessions"] == []
    # Of each turn's prompt all that the turn before it had, but for part of a block. The worker
    # says so with its next heartbeat.
    await asyncio.to_thread(
        eventually,
        lambda: metric("tidegate_prompt_tokens_cached_total") - cached > 0.5 * sum(totals),
        "the worker to have found most of what had been computed before",
    )


async def agent(http: aiohttp.ClientSession, number: int) -> int:
    """Have a conversation; how many tokens of its prompts had been computed before."""
    name = f"Agent number {number} tells a story about a small fox and the sea. "
    async with http.post("/v2/sessions", json={"prompt": name, "idle_keep_s": 300}) as response:
        assert response.status == 201
        session_id = (await response.json())["session_id"]
    said, before, repeated = name, 0, 0
    for turn in range(TURNS):
        new = f" Then, {turn}: "
        body = {"session_id": session_id, "prompt": new, "max_tokens": 12, "ignore_eos": True}
        async with http.post("/v2/tasks", json=body) as response:
            assert response.status == 202, await response.text()
            task = await response.json()
        async with http.get(task["events_url"]) as response:
            await response.read()
        async with http.get(f"/v2/tasks/{task['task_id']}") as response:
            answer = await response.json()
        assert answer["outcome"] == "met"
        repeated += before
        before = answer["usage"]["total_tokens"]
        said += new + answer["text"]
        async with http.get(f"/v2/sessions/{session_id}") as response:
            assert (await response.json())["prompt"] == said
    async with http.delete(f"/v2/sessions/{session_id}") as response:
        assert response.status == 200
    return repeated
