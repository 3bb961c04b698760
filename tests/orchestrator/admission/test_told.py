"""DL-6, DL-16, DL-17: starts foretold, clean ends in time, decisions that are sampled."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prediction.calibration import Calibration
from orchestrator.prediction.feasibility import RefusalKind, RefusalStats
from orchestrator.prediction.forecaster import Capacity, Forecaster
from orchestrator.prediction.releases import start_ms
from orchestrator.tasks.job import Priority
from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker, Plan
from worker.protocol import Code, End, FinishReason, Outcome

BODY = {"model": "", "prompt": "ab", "max_tokens": 50, "ignore_eos": True}

NOTHING = Capacity((), 0, 0, 0.0)

times = st.lists(st.floats(0.0, 1e5), min_size=1, max_size=16).map(sorted)


def test_dl16_a_start_is_the_middle_of_what_may_be() -> None:
    even = [10.0, 20.0, 30.0, 40.0]
    assert start_ms([even], [], 0) == 20.0
    assert start_ms([[100.0], [300.0]], [], 0) == 100.0
    assert start_ms([[100.0], [300.0]], [[50.0]], 0) == 150.0
    assert start_ms([[100.0], [300.0]], [[500.0]], 0) == 300.0
    assert start_ms([[100.0]], [], 1) == 0.0
    assert start_ms([], [], 0) == 0.0


@given(st.lists(times, max_size=8), st.lists(times, max_size=8), times, st.integers(-2, 3))
def test_dl16_more_ahead_never_means_sooner(
    running: list[list[float]], ahead: list[list[float]], one: list[float], free: int
) -> None:
    start = start_ms(running, ahead, free)
    assert start_ms(running, ahead, free + 1) <= start
    if len(running) > len(ahead) - free + 1:  # else there is nobody left to wait for
        assert start_ms(running, [*ahead, one], free) >= start


@pytest.mark.parametrize("needed", [0.2, 0.9])
def test_dl16_named_deadlines_are_as_safe_as_it_takes(needed: float) -> None:
    """Where ``needed`` of the way to a slow pace is enough, nine in ten are kept, and no more of it
    than that is put on all others."""
    forecaster = Forecaster(lambda model: NOTHING, drops_infeasible=True)
    rng, kept = random.Random(5), []
    for _ in range(2000):
        kept.append(forecaster._safety["m"] >= needed + rng.uniform(-0.2, 0.2))
        forecaster.promise_ended("m", kept=kept[-1])
    assert 0.9 <= sum(kept) / len(kept) < 0.97
    assert abs(forecaster._safety["m"] - needed) < 0.4


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


def ended(outcome: Outcome, **fields: object) -> Any:
    return SimpleNamespace(
        ending=SimpleNamespace(outcome=outcome),
        refusal_sample=False,
        on_end=[],
        priority=Priority.INTERACTIVE,
        deadline=SimpleNamespace(left_ms=lambda now: 50.0),
        **fields,
    )


def test_dl17_every_kind_of_decision_is_sampled_and_counted() -> None:
    draws = iter([False, True, True])
    refusals = RefusalStats(lambda task: next(draws))
    assert not refusals.is_spared(ended(Outcome.REFUSED), RefusalKind.QUEUE_FULL)
    assert refusals.unserved[RefusalKind.QUEUE_FULL] == 1
    for kind, outcome in ((RefusalKind.QUEUE, Outcome.MET), (RefusalKind.DROPPED, Outcome.MISSED)):
        task = ended(outcome)
        assert refusals.is_spared(task, kind)
        refusals.spare(task, kind)
        assert task.refusal_sample
        refusals.spare(task, RefusalKind.STOPPED)  # counted once, for the first
        for call in task.on_end:
            call(task)
    assert refusals.sampled == {(RefusalKind.QUEUE, True): 1, (RefusalKind.DROPPED, False): 1}
    assert refusals.false_rate == 0.5


def test_dl17_an_early_stop_is_one_of_them() -> None:
    refusals = RefusalStats()
    end = End(1, FinishReason.DEADLINE, 5, 3, 0, 0, 0, 50, code=Code.DEADLINE_EXCEEDED)
    refusals.stopped(ended(Outcome.MISSED), end, 0.0)
    assert refusals.unserved[RefusalKind.STOPPED] == 1
    task = ended(Outcome.MET)
    refusals.stopped(task, End(1, FinishReason.LENGTH, 5, 3, 0, 0, 0, 50, spared=True), 0.0)
    for call in task.on_end:
        call(task)
    assert refusals.sampled[RefusalKind.STOPPED, True] == 1


async def test_dl17_a_sample_is_let_in_beyond_a_full_queue(
    make_service: MakeService, make_worker: Any
) -> None:
    worker = await make_worker(max_running=1)
    plan = Plan(stall_at=1)
    worker.plan = lambda submit: plan
    service = await make_service(worker, queue_size=0, refusal_sample=1.0, worker_backlog=0)
    posts = [service.http.post("/v1/completions", json=BODY) for _ in range(2)]
    answers = asyncio.gather(*posts)
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    plan.release.set()
    assert [answer.status for answer in await answers] == [200, 200]
    labels = {"kind": "queue_full", "result": "met"}
    assert service.metric("tidegate_infeasible_samples_total", **labels) == 1
    assert service.metric("tidegate_false_refusal_rate") == 1
    bins = {"class": "interactive", "bin": "90"}
    assert service.metric("tidegate_on_time_chance_total", **bins) == 2
    assert service.metric("tidegate_on_time_met_total", **bins) == 2


def test_chances_are_counted_by_bin_and_class() -> None:
    calibration = Calibration()
    for chance, outcome in ((0.85, Outcome.MET), (0.8, Outcome.MISSED), (1.0, Outcome.MET)):
        calibration.ended(ended(outcome, given_chance=chance))
    calibration.ended(ended(Outcome.ABORTED, given_chance=0.85))
    calibration.ended(ended(Outcome.REFUSED, given_chance=None))
    tally = calibration.tallies[Priority.INTERACTIVE, 80]
    assert (tally.given, tally.met) == (2, 1)
    assert calibration.tallies[Priority.INTERACTIVE, 90].met == 1
