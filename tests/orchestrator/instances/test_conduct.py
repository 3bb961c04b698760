"""DL-11 where it matters: what real jobs' ends do to their instances' breakers."""

from dataclasses import dataclass

import pytest

from orchestrator.instances.breaker import BreakerConfig, Breakers, BreakerState, JobEnd, Ticket
from orchestrator.instances.conduct import charge, how_ended
from orchestrator.instances.instance import Instance
from orchestrator.prediction import IDLE, Load, StepModel
from tests.orchestrator.conftest import MakeService, MakeWorker
from tests.support.clock import ManualClock
from tests.support.fake_worker import Plan
from worker.protocol import AbortCause, Code, End, FinishReason

TASK = {"prompt": "x", "max_tokens": 10}

PACE = StepModel(
    slots=8,
    step_tokens=512,
    base_ms=10.0,
    row_ms=0.0,
    prompt_token_ms=0.1,
    ratios=(1.0, 1.2),
    fastest_ms=10.0,
)
"""100 tokens take about a second, 1.2 where things go badly."""


def make_end(reason: FinishReason, code: Code | None = None, tokens: int = 100) -> End:
    return End(1, reason, 10, tokens, 0.0, 0.0, 0.0, 0.0, code)


@dataclass
class Sent:
    ticket: Ticket
    cause: AbortCause | None = None
    basis: tuple[StepModel, Load] | None = (PACE, IDLE)
    dispatched_at: float = 100.0


@pytest.mark.parametrize(
    ("end", "cause", "how"),
    [
        (make_end(FinishReason.STOP), None, JobEnd.FINISHED),
        (make_end(FinishReason.LENGTH), None, JobEnd.FINISHED),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED), None, JobEnd.DEADLINE),
        (make_end(FinishReason.DEADLINE), None, JobEnd.DEADLINE),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_INFEASIBLE), None, JobEnd.REFUSED),
        (make_end(FinishReason.CANCELLED, Code.CANCELLED), None, JobEnd.ABORTED),
        (make_end(FinishReason.CANCELLED, Code.DRAINING), None, JobEnd.ABORTED),
        (make_end(FinishReason.ERROR, Code.ENGINE_ERROR), AbortCause.DISCONNECT, JobEnd.ABORTED),
        (make_end(FinishReason.ERROR, Code.ENGINE_ERROR), None, JobEnd.FAILED),
        (make_end(FinishReason.ERROR, Code.QUEUE_FULL), None, JobEnd.REFUSED),
        (make_end(FinishReason.ERROR, Code.INVALID_REQUEST), None, JobEnd.REFUSED),
    ],
)
def test_dl11_how_a_job_ended(end: End, cause: AbortCause | None, how: JobEnd) -> None:
    assert how_ended(end, cause) is how


@pytest.mark.parametrize(
    ("end", "took_s", "charged"),
    [
        (make_end(FinishReason.LENGTH), 1.0, False),
        (make_end(FinishReason.LENGTH), 3.0, False),
        (make_end(FinishReason.LENGTH), 10.0, True),
        # Stopped by a deadline: held against what its 5 tokens should have taken, no more.
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, tokens=5), 0.06, False),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, tokens=0), 0.2, False),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, tokens=5), 3.0, True),
        (make_end(FinishReason.CANCELLED, Code.CANCELLED, tokens=1), 30.0, False),
    ],
)
def test_dl11_an_instance_is_held_to_its_own_prediction(
    end: End, took_s: float, charged: bool
) -> None:
    clock = ManualClock()
    breakers = Breakers(lambda name: ("a:1", "b:1"), clock.now)
    instance = Instance("a:1")
    for _ in range(BreakerConfig().window):
        charge(breakers, instance, Sent(breakers.begin("a:1")), end, 100.0 + took_s)
    assert (breakers.state("a:1") is BreakerState.OPEN) is charged


def test_dl11_nothing_is_held_against_one_whose_pace_is_not_known() -> None:
    breakers = Breakers(lambda name: ("a:1", "b:1"), ManualClock().now)
    unknown = StepModel(8, 512, 10.0, 0.0, 0.1)
    end = make_end(FinishReason.LENGTH)
    for _ in range(50):
        sent = Sent(breakers.begin("a:1"), basis=(unknown, IDLE))
        charge(breakers, Instance("a:1"), sent, end, 200.0)
    assert breakers.state("a:1") is BreakerState.CLOSED


async def test_dl11_an_instance_that_fails_rests_and_the_other_works(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    workers = [await make_worker(), await make_worker()]
    service = await make_service(*workers)
    registry = service.orchestrator.registry
    await service.until(lambda: all(i.ready for i in registry))
    bad, good = sorted(workers, key=lambda w: w.address)
    bad.plan = lambda submit: Plan(fail_at=1)
    for _ in range(5):
        async with service.http.post("/v1/completions", json=TASK | {"model": "fake"}) as response:
            assert response.status == 502
    assert registry.breakers.state(bad.address) is BreakerState.OPEN
    for _ in range(5):
        async with service.http.post("/v1/completions", json=TASK | {"model": "fake"}) as response:
            assert response.status == 200
    assert (len(bad.submits), len(good.submits)) == (5, 5)
    assert service.metric("tidegate_ejections_total", instance=bad.address) == 1
    assert (
        service.metric("tidegate_breaker_state", instance=bad.address, state=BreakerState.OPEN) == 1
    )
    async with service.http.get("/v2/instances") as response:
        states = {i["address"]: i["breaker"] for i in (await response.json())["instances"]}
    assert states == {bad.address: "open", good.address: "closed"}
    assert service.outcomes() == ["failed"] * 5 + ["met"] * 5


async def test_dl11_tight_deadlines_and_cancels_open_no_breaker(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    workers = [await make_worker(), await make_worker()]
    for worker in workers:
        worker.plan = lambda submit: Plan(step_s=0.02)
    service = await make_service(*workers, admission="off")
    registry = service.orchestrator.registry
    await service.until(lambda: all(i.ready for i in registry))
    for _ in range(12):
        body = TASK | {"model": "fake", "deadline_ms": 50}
        async with service.http.post("/v1/completions", json=body) as response:
            assert response.status == 504
        async with service.http.post("/v2/tasks", json=TASK) as response:
            task = (await response.json())["task_id"]
        async with service.http.delete(f"/v2/tasks/{task}") as response:
            assert response.status == 202
    await service.until(lambda: all(i.load == 0 for i in registry))
    assert registry.breakers.ejections.total() == 0
    assert {registry.breakers.state(i.address) for i in registry} == {BreakerState.CLOSED}
