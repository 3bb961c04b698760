"""DL-7: only what is certain to miss is refused, and how often that was wrong is known."""

import pytest

from orchestrator.api.http.responses import error_headers
from orchestrator.api.native.events import error_object
from orchestrator.api.openai.shapes import error_body
from orchestrator.errors import DeadlineInfeasible
from orchestrator.prediction.feasibility import AdmissionMode
from orchestrator.tasks.ending import Ending
from protocol import End, FinishReason, Outcome, Sampling
from tests.support.admission import Rig


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


def test_dl7_a_refusal_says_what_would_do() -> None:
    rig = Rig()
    with pytest.raises(DeadlineInfeasible) as refusal:
        rig.admission.finish(rig.task(500))
    error = refusal.value
    assert (error.status, error.code) == (504, "deadline_infeasible")
    assert error_headers(error)["x-should-retry"] == "false"
    details = error.details
    assert details["binding_constraint"] == "decode"
    assert isinstance(details["predicted_finish_ms"], float)
    assert details["predicted_finish_ms"] > 500
    earliest = details["earliest_feasible_deadline"]
    assert isinstance(earliest, int)
    again = rig.task(earliest - 1000 * rig.clock.unix())
    assert not rig.refuses(again)
    assert rig.schedule.of(again).chance >= 0.9
    for body in (error_body(error)["error"], error_object(error)):
        assert isinstance(body, dict)
        assert body["code"] == "deadline_infeasible"
        assert body["predicted_finish_ms"] == details["predicted_finish_ms"]


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
