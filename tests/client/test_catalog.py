"""``Client.catalog`` in front of a real orchestrator."""

import asyncio
from pathlib import Path

import pytest

from tests.orchestrator.api.operator.test_catalog import register, register_whole
from tests.orchestrator.conftest import OPERATORS_KEY, Service
from tidegate import Client
from tidegate.errors import NotFound


async def test_models_are_listed_shown_and_verified(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    monkeypatch.setattr("tidegate.operating._PAGE", 2)
    await asyncio.to_thread(register, tmp_path, 2, 3, 4)
    entry = await asyncio.to_thread(register_whole, tmp_path)
    async with Client(service.url, token=OPERATORS_KEY) as client:
        listed = await client.catalog.models()
        assert [model.id for model in listed] == ["m", "m-2", "m-3", "m-4"]
        one = await client.catalog.model(entry.id)
        assert (one.bytes, one.files[0].sha256) == (entry.bytes, entry.files[0].sha256)
        assert (await client.catalog.verify(entry.id)).state in ("waiting", "running", "passed")
        while True:
            seen = (await client.catalog.model(entry.id)).verification
            if seen is not None and seen.ended_ms is not None:
                break
            await asyncio.sleep(0.01)
        assert seen.state == "passed"
        assert await client.catalog.engines() == []
        with pytest.raises(NotFound):
            await client.catalog.engine("none")
