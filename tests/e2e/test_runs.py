"""Runs of calls under one deadline, whose clients say nothing of them (DL-22), on a real stack."""

import asyncio
import time

import aiohttp
import pytest

from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.slow]

RUNS, CALLS, RUN_S = 12, 3, 6.0


async def call(http: aiohttp.ClientSession, run: str, due_at: float) -> float:
    """Make a call of a run. Returns how many further ones its share of the time allowed for."""
    body = {"model": "demo", "prompt": "What next?", "max_tokens": 4, "tenant": "agents"}
    headers = {"X-Session-Id": run, "X-Deadline": f"{1000 * due_at:.0f}"}
    async with http.post("/v2/tasks", json=body, headers=headers) as response:
        assert response.status == 202, await response.text()
        task = (await response.json())["task_id"]
    async with http.get(f"/v2/tasks/{task}/events") as events:
        await events.read()
    async with http.get(f"/v2/tasks/{task}") as response:
        answer = await response.json()
    assert answer["outcome"] == "met", answer
    return float(answer.get("calls_to_come", 0))


async def test_dl22_how_many_calls_are_to_come_is_learnt_from_runs_that_are_over(
    demo: Stack,
) -> None:
    """Agents of three calls each, one after the other, with one deadline for all three."""

    async def run(name: str, seconds: float) -> list[float]:
        due_at = time.time() + seconds
        return [await call(http, name, due_at) for _ in range(CALLS)]

    async with aiohttp.ClientSession(demo.url) as http:
        await asyncio.gather(*(run(f"run-{number}", RUN_S) for number in range(RUNS)))
        await asyncio.sleep(RUN_S + 1.5)  # until the last of them is over for certain
        expected = await run("another", 60.0)
        assert expected == pytest.approx([2, 1, 0], abs=0.6)
