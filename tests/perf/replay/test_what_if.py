"""``python -m perf.sim.what_if``: what an operator's route gave, replayed."""

import asyncio
from pathlib import Path

import pytest

from perf.sim import what_if
from tests.orchestrator.conftest import OPERATOR, Service
from tests.support.fake_worker import FakeWorker, Plan


async def submit(service: Service, max_tokens: int, deadline_ms: int) -> str:
    asked = {
        "prompt": "hi",
        "max_tokens": max_tokens,
        "deadline_ms": deadline_ms,
        "ignore_eos": True,
    }
    async with service.http.post("/v2/tasks", json=asked) as response:
        assert response.status == 202, await response.text()
        return str((await response.json())["task_id"])


async def test_a_miss_of_a_service_is_replayed(
    service: Service, worker: FakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker makes a token in a millisecond, by its own word, and then stands still."""
    met = await submit(service, 5, 10_000)
    await service.until(lambda: service.outcomes() == ["met"])
    worker.plan = lambda submit: Plan(stall_at=2)
    missed = await submit(service, 400, 300)
    await service.until(lambda: service.outcomes() == ["met", "missed"])
    file = tmp_path / "recording.json"
    async with service.http.get("/admin/recording", headers=OPERATOR) as response:
        file.write_bytes(await response.read())

    async def asked(name: str) -> int:
        return await asyncio.to_thread(what_if.main, [str(file), "--request", name])

    assert await asked(f"chatcmpl-{missed}") == 0
    happened, would, trust = capsys.readouterr().out.splitlines()
    assert happened.startswith(f"{missed}: missed at 0.3")
    assert happened.endswith(" s of 0.300 s, with 2 tokens.")
    assert would == "This alone would have met it: nothing that was tried."
    assert trust == "Of 2 requests, 2 are met or not in the replay as they were."
    assert await asked(met) == await asked("none") == 1
    assert "missed nothing: met" in capsys.readouterr().err
