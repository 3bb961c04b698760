"""OR-5, OR-2 on the real thing: an orchestrator that is killed loses no durable task."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.sse import read_events
from tests.support.stack import Orchestrator, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KILLS = 1

Seen = tuple[int, str, dict[str, Any]]


async def test_or5_what_was_promised_survives_kill_9(paced: Stack, tmp_path: Path) -> None:
    """One runs, one has ended, some wait: all of them end, once, with events that follow on."""
    journal = tmp_path / "journal.db"
    orchestrator = Orchestrator(
        paced.triton.grpc, journal__path=journal, limits__each_key__requests_per_min=12
    )
    body = {"model": "demo", "prompt": "hi", "ignore_eos": True, "durable": True, "seed": 3}
    with running(orchestrator):
        timeout = aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(base_url=orchestrator.url, timeout=timeout) as http:

            async def submit(key: str, tokens: int) -> tuple[str, int]:
                headers = {"Idempotency-Key": key}
                async with http.post(
                    "/v2/tasks", json=body | {"max_tokens": tokens}, headers=headers
                ) as response:
                    assert response.status == 202, await response.text()
                    answer = await response.json()
                async with http.get(f"/v2/tasks/{answer['task_id']}") as response:
                    return answer["task_id"], (await response.json())["deadline_unix_ms"]

            async def follow(task_id: str, after: int, most: int) -> list[Seen]:
                got: list[Seen] = []
                headers = {"Last-Event-ID": str(after)} if after >= 0 else {}
                url = f"/v2/tasks/{task_id}/events"
                async with http.get(url, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    async for event in read_events(response):
                        if event.kind != "metrics":
                            got.append((int(event.id), event.kind, event.data))
                        if len(got) >= most:
                            break
                return got

            undisturbed, _ = await submit("undisturbed", 150)
            expected = await follow(undisturbed, -1, 1000)
            runs, deadline = await submit("runs", 150)
            others = [(await submit(f"other-{n}", 150))[0] for n in range(4)]
            seen: list[Seen] = []
            for _ in range(KILLS):
                seen += await follow(runs, seen[-1][0] if seen else -1, 30)
                await asyncio.to_thread(orchestrator.kill)
                await asyncio.to_thread(orchestrator.start)
                assert await submit("runs", 150) == (runs, deadline)
            seen += await follow(runs, seen[-1][0], 1000)
            assert [number for number, _, _ in seen] == list(range(153))
            assert [data for _, kind, data in seen if kind == "token"] == [
                data for _, kind, data in expected if kind == "token"
            ]
            for task_id in others:
                assert (await follow(task_id, -1, 1000))[-1][1] == "end"
    eventually(lambda: orchestrator.status("/health") == 0, "the orchestrator to be gone")
    with closing(sqlite3.connect(journal)) as db:
        ended = db.execute("SELECT count(*), count(DISTINCT id), sum(outcome = 'met') FROM tasks")
        assert ended.fetchone() == (6, 6, 6)
        assert db.execute("SELECT count(*) FROM results").fetchone() == (6,)
        assert db.execute("SELECT count(*) FROM requests").fetchone() == (0,)
