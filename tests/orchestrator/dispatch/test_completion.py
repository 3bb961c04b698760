"""WP-5: how long an abort takes is published by its cause, and the deadline is one of them."""

import pytest

from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker, Plan

FREED = "tidegate_abort_to_freed_ms_count"


@pytest.mark.parametrize("worker_keeps_it", [True, False])
@pytest.mark.parametrize("on_deadline", ["error", "partial"])
async def test_wp5_a_deadline_is_a_cause(
    make_service: MakeService, worker: FakeWorker, on_deadline: str, worker_keeps_it: bool
) -> None:
    """Whether the worker stops at the deadline by itself, or has to be told."""
    worker.plan = lambda submit: Plan(stall_at=1, ignores_deadline=not worker_keeps_it)
    service = await make_service(worker, RETURN_MARGIN_S=0)
    body = {"prompt": "ab", "max_tokens": 5, "on_deadline": on_deadline, "deadline_ms": 150}
    async with service.http.post("/v1/completions", json={"model": ""} | body) as response:
        assert response.status == (200 if on_deadline == "partial" else 504)
    await service.until(lambda: service.metric(FREED, cause="deadline") == 1)
    assert service.metric("cancellation_detection_latency_ms_count") == 0, "nobody cancelled"
