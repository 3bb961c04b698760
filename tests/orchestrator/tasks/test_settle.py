"""DL-10, DL-14: what every ending comes to, exactly once."""

import pytest

from orchestrator.api.http.responses import error_headers, task_fields, task_headers
from orchestrator.errors import TidegateError
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Part, Parts
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import aborted, failed, judge, no_first_token, overdue
from orchestrator.telemetry.metrics import Metrics
from protocol import AbortCause, Code, Delta, End, FinishReason, OnDeadline, Outcome
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.jobs import make_job


def make_task(
    on_deadline: OnDeadline = OnDeadline.ERROR, tokens: int = 0, parts: Parts = NO_PARTS
) -> Task:
    """A task on the manual clock's first moment, with a second to go."""
    task = Task("t", make_job(deadline=Deadline(101.0, 0), parts=parts, on_deadline=on_deadline))
    if tokens:
        task.deliver(Delta(0, [1] * tokens, ["x"] * tokens), 100.5)
    return task


def make_end(reason: FinishReason, code: Code | None = None, tail: str = "") -> End:
    return End(0, reason, 3, 2, 1.0, 2.0, 3.0, 0.0, code, "why" if code else "", tail=tail)


S, L, D, C, E = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.DEADLINE,
    FinishReason.CANCELLED,
    FinishReason.ERROR,
)


@for_each(
    ("reason", "code", "late", "tokens", "partial", "outcome", "status"),
    [
        (S, None, False, 2, False, "met", None),
        (L, None, False, 2, True, "met", None),
        (S, None, True, 2, False, "missed", 504),
        (S, None, True, 2, True, "partial", None),
        (D, None, False, 2, True, "partial", None),
        (D, None, False, 0, True, "missed", 504),
        (D, Code.DEADLINE_EXCEEDED, True, 2, False, "missed", 504),
        (D, Code.DEADLINE_EXCEEDED, False, 2, False, "missed", 504),
        (D, Code.DEADLINE_EXCEEDED, False, 0, False, "refused", 504),
        (E, Code.DEADLINE_EXCEEDED, False, 0, False, "refused", 504),
        (E, Code.DEADLINE_INFEASIBLE, True, 0, False, "missed", 504),
        (E, Code.QUEUE_FULL, False, 0, False, "refused", 429),
        (E, Code.NO_CAPACITY, False, 0, False, "refused", 503),
        (D, Code.DEADLINE_EXCEEDED, False, 2, True, "partial", None),
        (E, Code.QUEUE_FULL, False, 2, False, "failed", 429),
        (E, Code.NO_CAPACITY, False, 2, True, "partial", None),
        (C, Code.DRAINING, False, 2, False, "failed", 503),
        (C, Code.DRAINING, False, 2, True, "partial", None),
        (E, Code.INSTANCE_LOST, False, 2, True, "partial", None),
        (C, None, False, 2, False, "aborted", 499),
        (E, None, False, 2, False, "failed", 502),
    ],
)
def test_dl10_the_outcome_of_every_ending(
    reason: FinishReason,
    code: Code | None,
    late: bool,
    tokens: int,
    partial: bool,
    outcome: str,
    status: int | None,
) -> None:
    task = make_task(OnDeadline.PARTIAL if partial else OnDeadline.ERROR, tokens)
    verdict = judge(task, make_end(reason, code), 101.5 if late else 100.5)
    assert verdict.outcome == outcome
    assert (verdict.error.status if verdict.error else None) == status
    if status == 504:
        assert verdict.error is not None
        exceeded = error_headers(verdict.error).get("X-Deadline-Exceeded-By-Ms")
        if late:
            assert exceeded is not None and float(exceeded) == pytest.approx(500)
        else:
            # A worker's word that the deadline is past counts, whatever this clock says; what it
            # gave up before that has exceeded nothing.
            assert exceeded == ("0.000" if code is None else None)
        assert error_headers(verdict.error)["x-should-retry"] == "false"


@for_each("code", Code)
def test_every_code_of_the_protocol_has_a_verdict(code: Code) -> None:
    """A client is told what a worker says of its request; what no worker has any business to say is
    a fault of its engine."""
    of_the_request = {
        Code.INVALID_REQUEST: (Outcome.REFUSED, code),
        Code.CONTEXT_OVERFLOW: (Outcome.REFUSED, code),
        Code.DEADLINE_EXCEEDED: (Outcome.REFUSED, code),
        Code.DEADLINE_INFEASIBLE: (Outcome.REFUSED, Code.DEADLINE_EXCEEDED),
        Code.QUEUE_FULL: (Outcome.REFUSED, code),
        Code.NO_CAPACITY: (Outcome.REFUSED, code),
        Code.CANCELLED: (Outcome.ABORTED, code),
        Code.CLIENT_DISCONNECTED: (Outcome.ABORTED, code),
        Code.DRAINING: (Outcome.FAILED, code),
        Code.INSTANCE_LOST: (Outcome.FAILED, code),
        Code.NOT_FINITE: (Outcome.FAILED, code),
    }
    verdict = judge(make_task(), make_end(E, code), 100.5)
    assert verdict.error is not None
    told = of_the_request.get(code, (Outcome.FAILED, Code.ENGINE_ERROR))
    assert (verdict.outcome, verdict.error.code) == told
    assert (verdict.error.message == "why") is (verdict.outcome is not Outcome.ABORTED)
    # Nothing to show: a client that takes part of a text gets the same.
    assert judge(make_task(OnDeadline.PARTIAL), make_end(E, code), 100.5).outcome == told[0]


@for_each(
    ("reason", "tokens", "told", "at", "outcome", "finish", "fitted"),
    [
        (D, 5, 3, 100.9, "met", L, 5),  # quicker than was foretold
        (D, 2, 3, 100.9, "met", L, 2),  # slower
        (D, 5, None, 100.9, "met", L, 5),  # all of it was to fit
        (D, 5, 3, 101.1, "partial", D, 5),  # too late to be met
        (L, 5, 3, 100.9, "met", L, 5),  # at its bound
        (L, 8, None, 100.9, "met", L, None),  # at the client's own
        (S, 2, 3, 100.9, "met", S, 3),
        (S, 5, 3, 100.9, "met", S, 5),
        (S, 5, None, 100.9, "met", S, None),
    ],
)
def test_dl6_an_answer_that_fits_is_met_and_says_how_long_it_could_be(
    reason: FinishReason,
    tokens: int,
    told: int | None,
    at: float,
    outcome: str,
    finish: FinishReason,
    fitted: int | None,
) -> None:
    task = make_task(OnDeadline.FIT, tokens)
    task.fitted_tokens = told
    settler = Settler(TaskMetrics(Metrics(), ManualClock()), ManualClock())
    assert settler.settle(task, judge(task, make_end(reason), at))
    assert task.ending is not None
    assert (task.ending.outcome, task.ending.finish_reason) == (outcome, finish)
    assert task.fitted_tokens == fitted


def test_dl10_only_the_first_ending_counts() -> None:
    clock = ManualClock()
    metrics = TaskMetrics(Metrics(), ManualClock())
    settler = Settler(metrics, clock)
    heard: list[Ending | None] = []
    task = make_task(tokens=5)
    task.on_end.append(lambda ended: heard.append(ended.ending))
    assert settler.settle(task, aborted(AbortCause.CANCEL))
    assert not settler.settle(task, failed(TidegateError("x")))
    assert not settler.settle(task, overdue(task, clock.now()))
    assert [ending and ending.outcome for ending in heard] == [Outcome.ABORTED]
    assert sum(metrics.settled.values()) == metrics.settled[Outcome.ABORTED] == 1
    assert (metrics.tokens_generated, metrics.tokens_wasted) == (5, 5)


FIRST, GAP, BOTH = (
    Parts(first_token_at=100.5),
    Parts(token_gap_s=0.1),
    Parts(first_token_at=100.5, token_gap_s=0.1, cut_at=100.5),
)


@for_each(
    ("parts", "frames", "missed"),
    [
        (FIRST, [(100.5, 1), (100.9, 1)], None),
        (FIRST, [(100.51, 1)], "first_token"),
        (GAP, [(100.7, 1), (100.8, 1), (100.9, 1)], None),
        (GAP, [(100.2, 1), (100.25, 1), (100.4, 1)], None),  # early ones make up for a late one
        (GAP, [(100.2, 1), (100.35, 1)], "token_gap"),
        (GAP, [(100.2, 1), (100.35, 1), (100.36, 5)], "token_gap"),  # and later ones do not
        (GAP, [(100.2, 1), (100.39, 2)], None),  # a frame is judged by its last token
        (GAP, [(100.2, 1), (100.41, 2)], "token_gap"),
        (BOTH, [(100.1, 1), (100.6, 1), (100.7, 1)], None),  # counted from the deadline
        (BOTH, [(100.1, 1), (100.61, 1)], "token_gap"),
        (BOTH, [(100.51, 1), (100.9, 1)], "first_token"),  # what was late first
    ],
)
@for_each("on_deadline", [OnDeadline.ERROR, OnDeadline.PARTIAL])
def test_dl14_met_means_that_all_parts_were_kept(
    parts: Parts, frames: list[tuple[float, int]], missed: str | None, on_deadline: OnDeadline
) -> None:
    metrics = Metrics()
    task = make_task(on_deadline, parts=parts)
    for at, tokens in frames:
        task.deliver(Delta(0, [1] * tokens, ["x"] * tokens), at)
    partial = on_deadline is OnDeadline.PARTIAL
    verdict = judge(task, make_end(D if partial else S), 100.95)
    assert Settler(TaskMetrics(metrics, ManualClock()), ManualClock()).settle(task, verdict)
    ending = task.ending
    assert ending is not None and ending.error is None
    kept = "partial" if partial else "met"
    assert (ending.outcome, ending.missed_part) == ("missed" if missed else kept, missed)
    assert task_fields(task) == ({"missed_part": missed} if missed else {})
    counted = metrics.registry.get_sample_value("tidegate_missed_parts_total", {"part": missed})
    assert counted == (1.0 if missed else None)


def test_dl14_the_whole_is_named_too_and_only_a_miss_names_anything() -> None:
    clock = ManualClock()
    settler = Settler(TaskMetrics(Metrics(), ManualClock()), clock)
    for verdict_of, part in (
        (lambda task: overdue(task, 101.5), Part.WHOLE),
        (lambda task: judge(task, make_end(D, Code.DEADLINE_EXCEEDED), 100.6), Part.WHOLE),
        (lambda task: no_first_token(task, 100.6), Part.FIRST_TOKEN),
        (lambda task: aborted(AbortCause.CANCEL), None),
        (lambda task: failed(TidegateError("x")), None),
    ):
        task = make_task(parts=BOTH)
        task.deliver(Delta(0, [1], ["x"]), 100.55)
        settler.settle(task, verdict_of(task))
        assert task.ending is not None and task.ending.error is not None
        assert task.ending.missed_part == part
        assert task_headers(task, clock.now()).get("X-Deadline-Missed-Part") == part


def test_dl14_an_answer_without_tokens_is_judged_by_its_end() -> None:
    for now, part in ((100.4, None), (100.6, Part.FIRST_TOKEN)):
        assert make_task(parts=FIRST).missed_at(now) == part
