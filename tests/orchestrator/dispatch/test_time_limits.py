"""DL-6: clean ends reach their clients in time."""

import pytest

from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker, Plan

BODY = {"model": "", "prompt": "ab", "max_tokens": 50, "ignore_eos": True}


async def test_dl6_text_leaves_before_the_deadline_though_its_worker_says_nothing(
    make_service: MakeService, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=3, ignores_deadline=True)
    service = await make_service(worker, return_margin_ms=300.0)
    body = BODY | {"on_deadline": "partial", "deadline_ms": 900}
    async with service.http.post("/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 200
    assert answer["choices"][0]["finish_reason"] == "deadline"
    assert answer["usage"]["completion_tokens"] == 3
    budget = response.headers["X-Deadline-Budget"]
    assert 0 < float(budget.rpartition("left=")[2]) <= 300
    assert service.outcomes() == ["partial"]


@pytest.mark.parametrize("on_deadline", ["error", "partial", "fit"])
async def test_dl6_of_a_clean_end_the_way_back_is_taken_off(
    make_service: MakeService, worker: FakeWorker, on_deadline: str
) -> None:
    service = await make_service(worker, return_margin_ms=5000.0)
    body = BODY | {"on_deadline": on_deadline, "deadline_ms": 60_000}
    async with service.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
    budget_ms = worker.submits[0].budget_ms
    assert (budget_ms < 55_000) is (on_deadline != "error")
    assert budget_ms > 30_000


async def test_dl6_without_a_token_there_is_nothing_to_give(
    make_service: MakeService, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=0, ignores_deadline=True)
    service = await make_service(worker, return_margin_ms=100.0)
    body = BODY | {"on_deadline": "partial", "deadline_ms": 300}
    async with service.http.post("/v1/completions", json=body) as response:
        await response.read()
    assert response.status == 504
    assert float(response.headers["X-Deadline-Exceeded-By-Ms"]) >= 0
