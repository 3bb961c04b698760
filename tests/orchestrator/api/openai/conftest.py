"""The official SDK, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.orchestrator.conftest import Service
from tests.support.lazy import openai


@pytest.fixture
async def sdk(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    # It reads certificates when it is made, which would block the loop.
    client = await asyncio.to_thread(
        lambda: openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="x")
    )
    async with client:
        yield client
