"""Why a request missed: what a service in front of a real Triton recorded of it, replayed."""

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from catalog.operator_key import access
from tests.e2e.conftest import Stack
from tidegate import Client, Failed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("idle_afterwards")]


async def test_a_miss_on_a_real_stack_is_replayed(paced: Stack, tmp_path: Path) -> None:
    """At 20 ms a token: a hundred of three hundred are there in two seconds."""
    async with Client(paced.url) as client:
        task = (await client.submit("Tell me.", max_tokens=300, deadline=2000)).task_id
        events = [event async for event in client.events(task)]
    assert isinstance(events[-1], Failed)
    allowed = {"Authorization": f"Bearer {access(paced.url).key}"}
    file = tmp_path / "recording.json"
    async with (
        aiohttp.ClientSession(paced.url, headers=allowed) as http,
        http.get("/admin/recording") as response,
    ):
        assert response.status == 200
        file.write_bytes(await response.read())
    command = [sys.executable, "-m", "perf.sim.what_if", str(file), "--request", task]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    happened, would, would_not, *_ = done.stdout.splitlines()
    assert happened.startswith(f"{task}: missed")
    assert "a deadline " in would
    assert "nobody else beside it" in would_not
    assert "(100 %)" in done.stdout
