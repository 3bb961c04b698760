"""The end of a service can be watched while it lasts, and is put down when it is over."""

import asyncio
import logging

import pytest

from orchestrator import lifecycle
from orchestrator.lifecycle import COME_BACK_S
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan

DRAIN_MS = "tidegate_graceful_shutdown_duration_ms"
SOON_S = 0.2


async def begin(service: Service, worker: FakeWorker, plan: Plan) -> None:
    worker.plan = lambda submit: plan
    await service.ask(
        "POST", "/v2/tasks", 202, json={"model": "fake", "prompt": "Hello", "max_tokens": 5}
    )
    await worker.until(lambda: worker.running == 1)


async def scraped(service: Service) -> float:
    lines = (await service.ask("GET", "/metrics")).splitlines()
    (line,) = [line for line in lines if line.startswith(f"{DRAIN_MS} ")]
    return float(line.split()[1])


async def test_or14_a_drain_is_told_while_it_lasts_and_at_its_end(
    service: Service,
    worker: FakeWorker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves a client without a connection time to come back for what has ended."""
    monkeypatch.setattr(lifecycle, "COME_BACK_S", SOON_S)
    plan = Plan(stall_at=1)
    await begin(service, worker, plan)
    assert await scraped(service) == 0
    draining = asyncio.create_task(service.parts.lifecycle.drain(60.0))
    await service.until(lambda: service.parts.health.ready.status == 503)
    first = await scraped(service)
    assert 0 < first < await scraped(service)
    plan.release.set()
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    (task,) = service.orchestrator.store.ended()
    assert (await service.ask("GET", f"/v2/tasks/{task.id}"))["outcome"] == "met"
    assert not draining.done()
    with caplog.at_level(logging.INFO):
        await draining
    took_ms = await scraped(service)
    assert took_ms > first and took_ms >= 1000 * SOON_S
    assert await scraped(service) == took_ms
    (record,) = [record for record in caplog.records if record.message == "drained"]
    assert record.fields == {"duration_ms": round(took_ms, 1), "unfinished_tasks": 0}


async def test_or14_nobody_waits_for_them_beyond_the_grace(
    service: Service, worker: FakeWorker
) -> None:
    await begin(service, worker, Plan())
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    async with asyncio.timeout(COME_BACK_S / 2):
        await service.parts.lifecycle.drain(0.0)
