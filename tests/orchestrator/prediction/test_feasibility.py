"""DL-7: only what is certain to miss is refused, and how often that was wrong is known."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.errors import DeadlineInfeasible
from orchestrator.prediction.feasibility import AdmissionMode, RefusalKind, RefusalStats
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Priority
from protocol import Code, End, FinishReason, Outcome, Sampling
from tests.orchestrator.conftest import MakeService
from tests.support.admission import Rig
from tests.support.fake_worker import Plan


def test_dl7_the_least_work_at_the_best_pace_decides() -> None:
    """100 tokens alone take 100 steps of 10 ms; nobody was ever faster than 0.8 of that."""
    rig = Rig()
    assert rig.refuses(rig.task(790))
    assert not rig.refuses(rig.task(815))
    assert rig.feasibility.stats.refused == 1


def test_dl7_an_open_end_only_counts_what_is_certain() -> None:
    """max_tokens says nothing about an answer that may stop at once; min_tokens does."""
    rig = Rig()
    assert not rig.refuses(rig.task(50, ignore_eos=False))
    task = rig.task(50, ignore_eos=False)
    task.sampling = Sampling(max_tokens=100, min_tokens=50)
    assert rig.refuses(task)


def test_dl7_what_was_learnt_refuses_nobody() -> None:
    """A thousand answers of 50 tokens: the next may still stop at once."""
    rig = Rig()
    for _ in range(1000):
        done = rig.task(1000, ignore_eos=False)
        end = End(0, FinishReason.STOP, 100, 50, 0.0, 10.0, 900.0, 0.0)
        rig.forecaster.ended(done, end)
    task = rig.task(20, ignore_eos=False)
    assert not rig.refuses(task)
    assert task.is_background  # but it gets what nobody else wants
    assert not rig.task(1000, ignore_eos=False).is_background


def test_dl7_the_deadline_that_a_refusal_names_has_a_good_chance() -> None:
    """What else it says: tests/orchestrator/api/http/test_feasibility.py."""
    rig = Rig()
    with pytest.raises(DeadlineInfeasible) as refusal:
        rig.admission.finish(rig.task(500))
    earliest = refusal.value.details["earliest_feasible_deadline"]
    assert isinstance(earliest, int)
    again = rig.task(earliest - 1000 * rig.clock.unix())
    assert not rig.refuses(again)
    assert rig.schedule.of(again).chance >= 0.9


def test_dl8_what_waited_in_vain_was_bound_by_the_queue() -> None:
    rig = Rig(load=16)
    task = rig.task(1500)
    rig.admission.finish(task)
    task.marks.queued = rig.clock.now()
    rig.queue.push(task)
    rig.clock.advance(1.0)
    assert rig.feasibility.infeasible(task).details["binding_constraint"] == "queue"


def test_dl7_off_and_observe_refuse_nothing() -> None:
    off = Rig(mode=AdmissionMode.OFF)
    assert not off.refuses(off.task(100))
    assert off.feasibility.stats.infeasible == 0
    observe = Rig(mode=AdmissionMode.OBSERVE)
    task = observe.task(100)
    assert not observe.refuses(task)
    assert observe.feasibility.stats.infeasible == 1
    assert task.refusal_sample


def test_dl7_the_cap_lets_the_rest_in() -> None:
    rig = Rig(refusal_cap=0.5)
    refused_count = sum(rig.refuses(rig.task(100)) for _ in range(2000))
    assert 0.45 < refused_count / 2000 < 0.6


def test_dl7_a_cap_of_nothing_refuses_nobody() -> None:
    """Neither at the door nor later, out of the queue."""
    rig = Rig(refusal_cap=0.0)
    task = rig.task(100)
    assert not rig.refuses(task)
    assert not rig.feasibility.gives_up(rig.task(100))
    assert rig.feasibility.stats.refused == 0


def test_dl7_the_cap_counts_what_is_refused_late() -> None:
    rig = Rig(refusal_cap=0.5)
    refused_count = sum(rig.feasibility.gives_up(rig.task(100)) for _ in range(2000))
    assert 0.0 < refused_count / 2000 < 0.6


def test_dl7_a_sample_measures_the_false_refusals() -> None:
    rig = Rig(sample=0.1)
    tasks = [rig.task(100) for _ in range(1000)]
    let_in = [task for task in tasks if not rig.refuses(task)]
    assert 60 < len(let_in) < 140
    for index, task in enumerate(let_in):
        outcome = Outcome.MET if index < 5 else Outcome.MISSED
        task.end(Ending(outcome, FinishReason.STOP), rig.clock.now())
    assert rig.feasibility.stats.false_rate == pytest.approx(5 / len(let_in))


def test_dl7_a_sample_of_what_waited_in_vain_gets_its_try() -> None:
    """It leaves only at its deadline, and is never in the background."""
    rig = Rig(load=16, sample=1.0)
    task, other = rig.task(1500), rig.task(5000)
    for each in (task, other):
        rig.admit(each)
        rig.queue.push(each)
    rig.clock.advance(1.0)
    assert not rig.feasibility.gives_up(task)
    assert rig.queue.expired(rig.clock.now()) == []
    assert not task.is_background
    rig.clock.advance(0.6)
    assert rig.queue.expired(rig.clock.now()) == [task]
    task.end(Ending(Outcome.MISSED, FinishReason.DEADLINE), rig.clock.now())
    assert (rig.feasibility.stats.infeasible, rig.feasibility.stats.sampled.total()) == (1, 1)


BODY = {"model": "", "prompt": "ab", "max_tokens": 50, "ignore_eos": True}


def ended(outcome: Outcome, **fields: object) -> Any:
    return SimpleNamespace(
        ending=SimpleNamespace(outcome=outcome),
        refusal_sample=False,
        on_end=[],
        priority=Priority.INTERACTIVE,
        **fields,
    )


def test_dl17_every_kind_of_decision_is_sampled_and_counted() -> None:
    draws = iter([False, True, True])
    refusals: RefusalStats[Any] = RefusalStats(lambda task: next(draws))
    assert not refusals.is_sampled(ended(Outcome.REFUSED), RefusalKind.QUEUE_FULL)
    assert refusals.unserved[RefusalKind.QUEUE_FULL] == 1
    for kind, outcome in ((RefusalKind.QUEUE, Outcome.MET), (RefusalKind.DROPPED, Outcome.MISSED)):
        task = ended(outcome)
        assert refusals.is_sampled(task, kind)
        refusals.sample(task, kind)
        assert task.refusal_sample
        refusals.sample(task, RefusalKind.STOPPED)  # counted once, for the first
        for call in task.on_end:
            call(task)
    assert refusals.sampled == {(RefusalKind.QUEUE, True): 1, (RefusalKind.DROPPED, False): 1}
    assert refusals.false_rate == 0.5


def test_dl17_an_early_stop_is_one_of_them() -> None:
    refusals: RefusalStats[Any] = RefusalStats()
    refusals.stopped(ended(Outcome.MISSED), Code.DEADLINE_EXCEEDED, 50.0, spared=False)
    assert refusals.unserved[RefusalKind.STOPPED] == 1
    refusals.stopped(ended(Outcome.MISSED), Code.DEADLINE_EXCEEDED, 0.0, spared=False)
    assert refusals.unserved[RefusalKind.STOPPED] == 1, "its deadline stopped it"
    task = ended(Outcome.MET)
    refusals.stopped(task, None, 50.0, spared=True)
    for call in task.on_end:
        call(task)
    assert refusals.sampled[RefusalKind.STOPPED, True] == 1


async def test_dl17_a_sample_is_let_in_beyond_a_full_queue(
    make_service: MakeService, make_worker: Any
) -> None:
    worker = await make_worker(max_running=1)
    plan = worker.does(Plan(stall_at=1))
    service = await make_service(worker, queue__max_waiting=0, REFUSAL_SAMPLE=1.0, MOST_BACKLOG=0)
    posts = [service.http.post("/v1/completions", json=BODY) for _ in range(2)]
    answers = asyncio.gather(*posts)
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    plan.release.set()
    assert [answer.status for answer in await answers] == [200, 200]
    labels = {"kind": "queue_full", "result": "met"}
    assert service.metric("tidegate_infeasible_samples_total", **labels) == 1
    assert service.metric("tidegate_false_refusal_rate") == 1
