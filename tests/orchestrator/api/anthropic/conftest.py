"""The official SDK, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.orchestrator.conftest import Service
from tests.support.lazy import anthropic


@pytest.fixture
async def sdk(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    # It reads certificates when it is made, which would block the loop.
    client = await asyncio.to_thread(
        lambda: anthropic.AsyncAnthropic(base_url=service.url, api_key="x", max_retries=2)
    )
    async with client:
        yield client
