"""Hedging before the first token: when, how often, and that the loser is gone (OR-10)."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.dispatch.hedge import Hedger
from orchestrator.dispatch.retry import RetryBudget
from orchestrator.prediction.step_model import IDLE, StepModel
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.task import Task
from protocol import Code
from tests.orchestrator.conftest import MakeTwo, Service
from tests.orchestrator.dispatch.test_retry import EXPECTED, kinds_of, speak, text_of
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.jobs import make_job
from tests.support.paces import pace_of

TASK = {"prompt": "hello", "max_tokens": 20}
PACE = pace_of(
    slots=8, step_tokens=512, base_ms=10.0, row_ms=0.0, prompt_token_ms=1.0, fastest_ms=10.0
)
"""A first token of a prompt of 10 tokens takes 20 ms, 30 where things go badly; 12 tokens, which
few answers exceed, take 130 ms, 170 where things go badly, and 8 ms for one are certain."""


def may_begin_one(hedger: Hedger) -> Hedger:
    """Enough was offered for a rival."""
    while hedger.budget.is_empty:
        hedger.budget.offered()
    return hedger


def make_task(*, left_ms: float) -> Task:
    """At the moment 100 s."""
    task = Task("t", make_job(deadline=Deadline(100.0 + left_ms / 1000, 0)))
    task.prompt_tokens = 10
    return task


@pytest.mark.parametrize(
    ("late_ms", "left_ms", "pace", "due"),
    [
        (50.0, 150.0, PACE, True),
        (25.0, 150.0, PACE, False),  # its first token may still come in time
        (50.0, 300.0, PACE, False),  # slack is long enough
        (50.0, 7.5, PACE, False),  # too late for anybody
        (50.0, 150.0, pace_of(8, 512, 10.0, 0.0, 1.0), False),  # pace not known yet
    ],
)
async def test_or10_only_when_late_and_slack_is_short(
    service: Service, late_ms: float, left_ms: float, pace: StepModel, due: bool
) -> None:
    task = make_task(left_ms=left_ms)
    forecaster: Any = SimpleNamespace(most_tokens_left=lambda task: 12)
    hedger = may_begin_one(Hedger(service.orchestrator.registry, forecaster, share=0.02))
    assert hedger.is_due(task, (pace, IDLE), 100.0 - late_ms / 1000, 100.0) is due
    assert not hedger.is_due(task, None, 0.0, 100.0)
    hedger.budget.spend()
    assert not hedger.is_due(task, (pace, IDLE), 100.0 - late_ms / 1000, 100.0)


def test_or10_at_most_one_in_fifty_from_the_first_on() -> None:
    budget = RetryBudget(0.02, 1.0, is_full=False)
    spent = 0
    for offered in range(1, 1001):
        budget.offered()
        if not budget.is_empty:
            budget.spend()
            spent += 1
        assert spent <= 0.02 * offered + 1e-9
    assert spent >= 19


@pytest.fixture
async def race(
    make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch
) -> tuple[Service, FakeWorker, FakeWorker]:
    """Whatever has no token at the next look gets a rival."""
    service, first, second = await make_two()
    monkeypatch.setattr(may_begin_one(service.parts.hedger), "is_due", lambda *args: True)
    return service, first, second


def hedges(service: Service, what: str) -> float:
    return service.metric("tidegate_hedges_total", what=what)


async def settled(service: Service, *workers: FakeWorker) -> None:
    for worker in workers:
        await worker.until(lambda w=worker: w.running == 0)  # type: ignore[misc]
    await service.until(lambda: all(i.load == 0 for i in service.orchestrator.registry))


async def test_or10_the_rival_wins_and_the_loser_is_verified_gone(
    race: tuple[Service, FakeWorker, FakeWorker],
) -> None:
    service, first, second = race
    first.plan = lambda submit: Plan(stall_at=0)
    second.plan = lambda submit: Plan(speak=speak)
    events = await service.run(TASK)
    assert kinds_of(events) == ["queued", "started", "token", "end"]
    assert text_of(events) == EXPECTED
    await settled(service, first, second)
    assert (len(first.cancels), len(second.cancels)) == (1, 0)
    assert (hedges(service, "begun"), hedges(service, "won")) == (1, 1)
    assert service.metric("tidegate_hedge_aborts_verified_total") == 1
    assert service.outcomes() == ["met"]
    assert service.orchestrator.registry.breakers.ejections.total() == 0


async def test_or10_the_first_one_wins_after_all(
    race: tuple[Service, FakeWorker, FakeWorker],
) -> None:
    service, first, second = race
    held = first.does(Plan(stall_at=0, speak=speak))
    second.plan = lambda submit: Plan(stall_at=0)
    running = asyncio.create_task(service.run(TASK))
    await second.until(lambda: second.running == 1)
    held.release.set()
    assert text_of(await running) == EXPECTED
    await settled(service, first, second)
    assert (len(first.cancels), len(second.cancels)) == (0, 1)
    assert (hedges(service, "begun"), hedges(service, "lost")) == (1, 1)
    assert service.metric("tidegate_hedge_aborts_verified_total") == 1


@pytest.mark.parametrize("plan", [{"die_at": 0}, {"refuse": (Code.NO_CAPACITY, "full")}])
async def test_or10_a_rival_that_fails_changes_nothing(
    race: tuple[Service, FakeWorker, FakeWorker], plan: dict[str, Any]
) -> None:
    service, first, second = race
    held = first.does(Plan(stall_at=0, speak=speak))
    second.plan = lambda submit: Plan(**plan)
    running = asyncio.create_task(service.run(TASK))
    await second.until(lambda: len(second.submits) == 1 and second.running == 0)
    held.release.set()
    assert text_of(await running) == EXPECTED
    assert service.outcomes() == ["met"]


@pytest.mark.parametrize("way", ["die_at", "fail_at"])
async def test_or10_the_rival_is_left_when_the_first_one_dies_or_fails(
    race: tuple[Service, FakeWorker, FakeWorker], way: str
) -> None:
    """Nothing has been told to the client yet, and the rival is well."""
    service, first, second = race
    failing, held = Plan(stall_at=0, **{way: 0}), Plan(stall_at=0, speak=speak)
    first.plan = lambda submit: failing
    second.plan = lambda submit: held
    running = asyncio.create_task(service.run(TASK))
    await second.until(lambda: second.running == 1)
    failing.release.set()
    lost = service.orchestrator.registry.instances[first.address]
    await service.until(lambda: lost.load == 0)
    held.release.set()
    assert text_of(await running) == EXPECTED
    assert len(second.submits) == 1
    assert service.outcomes() == ["met"]


async def test_or10_a_cancel_stops_both(race: tuple[Service, FakeWorker, FakeWorker]) -> None:
    service, first, second = race
    first.plan = second.plan = lambda submit: Plan(stall_at=0)
    task = (await service.ask("POST", "/v2/tasks", 202, json=TASK))["task_id"]
    await second.until(lambda: second.running == 1)
    await service.ask("DELETE", f"/v2/tasks/{task}", 202)
    await settled(service, first, second)
    assert service.outcomes() == ["aborted"]


async def test_or10_none_while_others_wait(
    make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, first, second = await make_two(card={"max_running": 1}, MOST_BACKLOG=0)
    plan = second.does(first.does(Plan(stall_at=0)))
    monkeypatch.setattr(may_begin_one(service.parts.hedger), "is_due", lambda *args: True)
    for _ in range(3):
        await service.ask("POST", "/v2/tasks", 202, json=TASK)
    assert len(service.orchestrator.queue) == 1
    service.orchestrator.stages.dispatcher.upkeep()
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["met"] * 3)
    assert hedges(service, "begun") == 0
