"""Why a request missed, asked of a service in front of a real Triton: the command, its replay."""

import asyncio
import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import Stack
from tidegate import Client, Failed

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]


async def test_a_miss_on_a_real_stack_is_explained(paced: Stack) -> None:
    """At 20 ms a token: a hundred of three hundred are there in two seconds."""
    async with Client(paced.url) as client:
        task = (await client.submit("Tell me.", max_tokens=300, deadline=2000)).task_id
        events = [event async for event in client.events(task)]
    assert isinstance(events[-1], Failed)
    command = [sys.executable, "-m", "tidegate", "explain", task, "--url", paced.url, "--json"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == "missed"
    replay = found["replay"]
    assert replay["reproduced"] and replay["agreed"] == replay["compared"] >= 1
    (later,) = [one for one in found["would_have_met"] if one["change"] == "later_deadline"]
    assert later["by_ms"] >= 100
    assert "nobody_else" in [one["change"] for one in found["would_not"]]
