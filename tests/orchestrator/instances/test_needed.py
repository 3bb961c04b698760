"""PF-7: how many instances the present load needs."""

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import DeadlineInfeasible
from orchestrator.instances.needed import FEW_ENDED, WaitingWork, instances_needed, is_lost
from orchestrator.tasks.task import Task
from protocol import Outcome
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import Plan

works = st.builds(WaitingWork, st.floats(0, 1e4), st.floats(-1e3, 1e6))
loads = st.tuples(st.integers(0, 50), st.floats(0, 50), st.lists(works, max_size=30))


@for_each(
    ("up", "busy", "needed"),
    [(0, 0.0, 0), (1, 0.0, 0), (4, 0.4, 0.5), (4, 0.8, 1), (4, 3.2, 4), (4, 4.0, 5)],
)
def test_what_runs_takes_at_most_four_fifths(up: int, busy: float, needed: float) -> None:
    """PF-7's utilization of 80 %; whatever else there is stands idle."""
    assert instances_needed(up, busy, []) == pytest.approx(needed)


def test_what_waits_counts_by_how_soon_it_is_due() -> None:
    hundred = [WaitingWork(1000.0, 300_000.0)] * 100
    assert 1.5 < instances_needed(2, 1.2, hundred) < 2  # a third of an instance's time
    assert instances_needed(2, 1.2, [one._replace(left_ms=20_000.0) for one in hundred]) > 7
    # What is due later adds to what is due first, and does not hide it.
    urgent = [WaitingWork(1000.0, 2000.0)] * 6
    few, many = (instances_needed(2, 1.2, [*more, *urgent]) for more in ([], hundred))
    assert few == many == pytest.approx((1.2 + 3) / 0.8)
    assert instances_needed(2, 1.2, [WaitingWork(400.0, 1.0)]) == pytest.approx(2), (
        "no new one would help that"
    )


def test_losses_need_one_more_than_there_are() -> None:
    """Where what is too late has left the queue, too little waits to tell of it."""
    assert instances_needed(3, 2.0, [], lost=0.05) == 2.5
    assert instances_needed(3, 2.0, [], lost=0.06) == 4
    assert instances_needed(3, 2.0, [WaitingWork(8000.0, 2000.0)], lost=0.06) == 7.5


@for_each(("binding", "lost"), [("queue", True), ("decode", False)])
def test_a_refusal_counts_if_the_queue_would_have_made_it_late(binding: str, lost: bool) -> None:
    """On arrival too; what would be late on an idle instance is no reason for one more."""
    error = DeadlineInfeasible(
        "", predicted_finish_ms=1.0, earliest_feasible_unix_ms=1, binding_constraint=binding
    )
    ending = SimpleNamespace(outcome=Outcome.REFUSED, error=error)
    assert is_lost(cast("Task", SimpleNamespace(ending=ending))) is lost


@given(loads, works, st.floats(0, 1))
def test_more_load_never_needs_fewer(
    load: tuple[int, float, list[WaitingWork]], more: WaitingWork, lost: float
) -> None:
    up, busy, waiting = load
    needed = instances_needed(up, busy, waiting, lost)
    assert needed >= 0
    assert instances_needed(up, busy + 0.5, waiting, lost) >= needed
    assert instances_needed(up, busy, [*waiting, more], lost) >= needed
    sooner = [one._replace(left_ms=one.left_ms / 2) for one in waiting if one.left_ms > 0]
    later = [one for one in waiting if one.left_ms > 0]
    assert instances_needed(up, busy, sooner, lost) >= instances_needed(up, busy, later, lost)


def needed(service: Service) -> float:
    return service.metric("tidegate_instances_needed", model="fake")


async def submit(service: Service, status: int = 202) -> None:
    task = {"prompt": "hi", "max_tokens": 8, "deadline_ms": 60_000}
    await service.ask("POST", "/v2/tasks", status, json=task)


async def test_a_service_tells_its_need(make_service: MakeService, make_worker: MakeWorker) -> None:
    """Of two workers with two slots each: as they fill, and as a full queue turns work away."""
    plan = Plan(stall_at=1)
    workers = [await make_worker(max_running=2) for _ in range(2)]
    for worker in workers:
        worker.plan = lambda submit: plan
    service = await make_service(*workers, queue__max_waiting=1)
    assert needed(service) == 0
    for tasks in (1, 2, 3, 4):
        await submit(service)
        await service.until_tokens(1, tasks=tasks)
    assert service.metric("tidegate_utilization") == 1
    assert needed(service) == 2.5
    while service.metric("tidegate_queue_depth") < 1:
        await submit(service)
    for _ in range(FEW_ENDED):
        await submit(service, 429)
    plan.release.set()
    await service.until(lambda: not service.orchestrator.live_tasks)
    assert needed(service) == 3, "one more than there are, for what was turned away"
