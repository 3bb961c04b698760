"""DL-17: decisions that end a request unserved are sampled and counted, and so are chances."""

import asyncio
from types import SimpleNamespace
from typing import Any

from orchestrator.prediction.feasibility import RefusalKind, RefusalStats
from orchestrator.tasks.job import Priority
from protocol import Code, Outcome
from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import Plan

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
    plan = Plan(stall_at=1)
    worker.plan = lambda submit: plan
    service = await make_service(worker, queue__max_waiting=0, REFUSAL_SAMPLE=1.0, MOST_BACKLOG=0)
    posts = [service.http.post("/v1/completions", json=BODY) for _ in range(2)]
    answers = asyncio.gather(*posts)
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    plan.release.set()
    assert [answer.status for answer in await answers] == [200, 200]
    labels = {"kind": "queue_full", "result": "met"}
    assert service.metric("tidegate_infeasible_samples_total", **labels) == 1
    assert service.metric("tidegate_false_refusal_rate") == 1
