"""The orchestrator as a process of its own, and the official SDKs, unmodified."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.orchestrator.conftest import Service
from tests.support.lazy import anthropic, openai


@pytest.fixture
async def sdk(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    # It reads certificates when it is made, which would block the loop.
    client = await asyncio.to_thread(
        lambda: openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="x")
    )
    async with client:
        yield client


@pytest.fixture
async def claude(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    client = await asyncio.to_thread(
        lambda: anthropic.AsyncAnthropic(base_url=service.url, api_key="x")
    )
    async with client:
        yield client


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    root = Path(__file__).parents[3]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    return kept | {
        "PYTHONPATH": str(root),
        "TIDEGATE_PORT": "0",
        "TIDEGATE_TELEMETRY__LOG_FORMAT": "json",
    }


async def start_process(environment: dict[str, str], tmp_path: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", stderr=-1, env=environment, cwd=tmp_path
    )


async def log_until(process: asyncio.subprocess.Process, message: str) -> dict[str, object]:
    assert process.stderr is not None
    async for line in process.stderr:
        entry: dict[str, object] = json.loads(line)
        if entry["message"] == message:
            return entry
    raise AssertionError(f"it ended without saying {message!r}")
