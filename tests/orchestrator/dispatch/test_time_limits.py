"""DL-6: clean ends reach their clients in time."""

import random

import pytest

from orchestrator.dispatch.time_limits import EVERY_S, LoopDelay, TimeLimits
from orchestrator.instances.instance import Instance
from protocol import OnDeadline
from tests.orchestrator.conftest import MakeService
from tests.support.admission import Rig
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan

BODY = {"model": "", "prompt": "ab", "max_tokens": 50, "ignore_eos": True}
FREED = "tidegate_abort_to_freed_ms_count"


@pytest.mark.parametrize("worker_keeps_it", [True, False])
@pytest.mark.parametrize(("on_deadline", "status"), [("error", 504), ("partial", 200)])
async def test_wp5_a_deadline_is_a_cause(
    make_service: MakeService,
    worker: FakeWorker,
    on_deadline: str,
    status: int,
    worker_keeps_it: bool,
) -> None:
    """Whether the worker stops at the deadline by itself, or has to be told: how long an abort
    takes is published by its cause."""
    worker.does(Plan(stall_at=1, ignores_deadline=not worker_keeps_it))
    service = await make_service(worker, RETURN_MARGIN_S=0)
    body = BODY | {"on_deadline": on_deadline, "deadline_ms": 150}
    await service.ask("POST", "/v1/completions", status, json=body)
    await service.until(lambda: service.metric(FREED, cause="deadline") == 1)
    assert service.metric("cancellation_detection_latency_ms_count") == 0, "nobody cancelled"


async def test_dl6_text_leaves_before_the_deadline_though_its_worker_says_nothing(
    make_service: MakeService, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=3, ignores_deadline=True)
    service = await make_service(worker, RETURN_MARGIN_S=0.3)
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
    service = await make_service(worker, RETURN_MARGIN_S=5)
    body = BODY | {"on_deadline": on_deadline, "deadline_ms": 60_000}
    await service.ask("POST", "/v1/completions", json=body)
    budget_ms = worker.submits[0].budget_ms
    assert (budget_ms < 55_000) is (on_deadline != "error")
    assert budget_ms > 30_000


def test_dl19_the_way_back_of_a_crowded_start_is_soon_forgotten() -> None:
    """DL-16: round trips of 0.3 s for a minute cost the answers after it a quarter of their time,
    a hundred of them; within a crowd one slow way in five is no reason to stop early."""
    rig, instance = Rig(), Instance("a:1")
    limits, rng = TimeLimits(return_margin_s=0.005), random.Random(3)
    task = rig.task(1000, on_deadline=OnDeadline.PARTIAL)

    def kept_ms() -> float:
        return 1000 - limits.budget_ms(task, instance, rig.clock.now())

    for _ in range(200):
        instance.round_trip_ms.append(rng.uniform(200, 400))
    assert kept_ms() == pytest.approx(105)  # a tenth, and the client's
    for _ in range(20):
        instance.round_trip_ms.append(rng.uniform(2, 4))
    assert 7 < kept_ms() < 9
    for i in range(100):
        instance.round_trip_ms.append(300.0 if i % 5 == 0 else rng.uniform(2, 4))
    assert 7 < kept_ms() < 9


def test_dl16_a_clean_end_allows_for_a_loop_that_is_late() -> None:
    clock = ManualClock()
    rig, delay = Rig(), LoopDelay(clock)
    limits = TimeLimits(return_margin_s=0.005, loop_delay=delay)
    task = rig.task(1000, on_deadline=OnDeadline.PARTIAL)
    now, at = rig.clock.now(), task.deadline.at
    assert limits.ends_at(task, at - 0.001) == at, "without a token there is nothing to give"
    task.completion_tokens = 5
    assert limits.ends_at(task, now) == pytest.approx(at - 0.005)
    for delay_s, left_s in ((0.01, 0.025), (0.5, 0.105)):
        for _ in range(300):
            delay.watch(clock.now() + EVERY_S)
            clock._now += EVERY_S + delay_s  # nothing runs meanwhile
            clock.advance(0.0)
        assert limits.ends_at(task, now) == pytest.approx(at - left_s)
        assert limits.budget_ms(task, Instance("a:1"), now) < 1000 * (1 - left_s)
    plain = rig.task(1000)
    assert limits.ends_at(plain, now) == plain.deadline.at
