"""DL-7, DL-15: who is let in, by the schedule played forward."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from orchestrator.errors import DeadlineInfeasible
from orchestrator.prediction.forecast import Asked, play
from orchestrator.tasks.deadline import Parts
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from protocol import FinishReason, OnDeadline, Outcome
from tests.support.admission import UNKNOWN, Rig
from tests.support.cases import for_each
from tests.support.paces import machine_of, pace_of

PACE = pace_of(16, 512, 5.0, 0.5, 0.1, fastest_ms=1.0)
"""5.5 ms a token for one, 13 ms for each of 16; a prompt of 100 tokens takes 10 ms."""


def new_rig(**feasibility: float) -> Rig:
    return Rig(PACE, **{"least_chance": 0.1} | feasibility)


def runs(rig: Rig, task: Task, *, made: int = 1) -> Task:
    task.completion_tokens = made
    rig.running.append(SimpleNamespace(task=task, is_paused=False))
    return task


def crowd(left_ms: float = 60_000, count: int = 16, tokens: int = 1000, **task: object) -> Rig:
    """One with so many rows, of so long answers."""
    rig = new_rig()
    for _ in range(count):
        runs(rig, rig.task(left_ms, tokens, **task))
    return rig


def five_that_are_just_in_time(**task: object) -> Rig:
    return crowd(800, 5, 100, **task)


def let_in(rig: Rig, tasks: list[Task]) -> int:
    count = 0
    for task in tasks:
        if not rig.refuses(task):
            rig.queue.push(task)
            count += 1
    return count


def test_dl7_of_equal_requests_at_once_as_many_are_let_in_as_can_be_met() -> None:
    """Alone each would be met; all together none would."""
    rig = new_rig()
    tasks = [rig.task(1000, 100, prompt=1) for _ in range(16)]
    count = let_in(rig, tasks)
    fits = int((1000 / 100 - PACE.base_ms) / PACE.row_ms)
    assert fits - 2 <= count <= fits + 1
    met = rig.schedule.chances("m")
    assert sum(met.values()) >= fits - 2


@for_each(("first_ms", "is_refused"), [(80, True), (180, False)])
def test_dl7_a_first_token_that_cannot_come_in_time_is_refused(
    first_ms: float, is_refused: bool
) -> None:
    rig = new_rig()
    first_at = rig.clock.now() + first_ms / 1000
    task = rig.task(10_000, 10, prompt=1000, parts=Parts(first_at, math.inf, first_at))
    if not is_refused:
        assert not rig.refuses(task)
        return
    with pytest.raises(DeadlineInfeasible, match="until the first token is due") as refusal:
        rig.admission.finish(task)
    assert refusal.value.details["binding_constraint"] == "first_token"


def test_dl7_the_queue_ahead_counts() -> None:
    rig = crowd()
    assert let_in(rig, [rig.task(60_000, 1000, prompt=1) for _ in range(16)]) == 16
    late = rig.task(20_000, 10, prompt=1)
    late.rank = math.inf
    rig.queue.push(late)  # as what comes behind all others
    assert rig.schedule.of(late).start_ms[0] > 20_000
    assert rig.schedule.chances("m")[late] == 0


def test_dl7_what_lost_its_chance_while_it_waited_is_told() -> None:
    rig = crowd()
    hopeless, other = rig.task(100, 100, prompt=1), rig.task(60_000, 10, prompt=1)
    for task in (hopeless, other):
        rig.queue.push(task)
    assert rig.feasibility.hopeless("m") == [hopeless]
    assert rig.feasibility.gives_up(hopeless)


def test_lb1_looks_ahead_take_a_small_share_of_the_time() -> None:
    """What there is no time to look at is let in, and looked at with all others as it waits."""
    rig = crowd()
    assert rig.refuses(rig.task(100, 100, prompt=1))
    rig.feasibility._looks.take(lambda: rig.clock.advance(1.0))
    unseen = rig.task(100, 100, prompt=1)
    assert not rig.refuses(unseen)
    rig.queue.push(unseen)
    assert rig.feasibility.hopeless("m") == [unseen]
    rig.queue.remove(unseen)
    rig.clock.advance(10.0)
    assert rig.refuses(rig.task(100, 100, prompt=1))


def test_dl22_a_learnt_number_of_calls_refuses_nobody() -> None:
    """An idle service has a second for a call of 0.5 s, and learnt that nine are to come."""
    rig = new_rig()
    learnt, stated = rig.task(1000, 50, prompt=1), rig.task(1000, 50, prompt=1, calls_left=9)
    learnt.calls_left = stated.calls_left = 9
    assert not rig.refuses(learnt)
    assert rig.refuses(stated), "the run cannot be in time"


def test_dl15_urgent_work_takes_a_row_of_what_has_time() -> None:
    """A place behind all rows is too late for it; a row of theirs is not."""
    rig = crowd()
    urgent = rig.task(500, 10, prompt=1)
    assert rig.schedule.of(urgent).chance == 0
    assert rig.schedule.of(urgent, enough=0.1).chance == 1
    assert not rig.refuses(urgent)
    rig.schedule.may_get_row = lambda task: False
    assert not rig.refuses(urgent), "they have ample time"
    rig.schedule.may_free_row = lambda task: False
    assert rig.refuses(urgent), "no job can be paused for it"


def test_dl7_a_crowd_takes_each_row_once() -> None:
    """Each of forty has time for its ten tokens among 16 rows, 0.13 s, once or twice in a row."""
    rig = crowd()
    newcomers = [rig.task(300, 10, prompt=1) for _ in range(40)]
    assert 24 <= let_in(rig, newcomers) <= 34
    assert rig.feasibility.hopeless("m") == [], "each of the others waits for its own row"


def test_dl7_urgent_work_takes_no_row_if_the_rule_of_pauses_would_not_give_one() -> None:
    rig = crowd(4_000)
    urgent = rig.task(500, 10, prompt=1)
    assert not rig.refuses(urgent)
    rig.schedule.may_get_row = lambda task: False
    assert rig.refuses(urgent)


def test_dl15_urgent_work_runs_among_fewer_rows_where_nobody_loses_by_that() -> None:
    """Among sixteen rows its hundred tokens take 1.3 s, among four 0.7 s."""
    rig = crowd()
    urgent = rig.task(900, 100, prompt=1)
    assert not rig.refuses(urgent)
    rig.queue.push(urgent)
    assert 2 <= urgent.most_rows <= 6
    assert rig.schedule.most_rows("m") == {"": urgent.most_rows}
    urgent.paused_on = "a"
    assert not rig.schedule.most_rows("m"), "it does not run"


@for_each(
    ("rig", "why"),
    [
        (crowd(8_000), "it would cost those who have little time"),
        (crowd(tenant="other"), "or24: the rows of another tenant"),
    ],
)
def test_dl15_urgent_work_takes_no_rows_of_others_than_its_own(rig: Rig, why: str) -> None:
    urgent = rig.task(900, 100, prompt=1)
    assert rig.refuses(urgent), why
    assert urgent.most_rows == math.inf


def test_dl15_a_look_that_finds_no_gain_binds_nobody() -> None:
    rig = new_rig(least_chance=0.5)
    for _ in range(16):
        runs(rig, rig.task(60_000, 1000))
    urgent = rig.task(700, 100, prompt=1)
    assert rig.refuses(urgent) and urgent.most_rows == math.inf
    rig = crowd()
    rig.schedule.adapts_rows = lambda model: False
    assert rig.refuses(rig.task(900, 100, prompt=1)), "rows are not adapted"


@for_each(("seconds", "step_ms"), [(0.0, 5.5), (60.0, 13.0)])
def test_dl7_as_many_as_usual_come_for_what_ends(seconds: float, step_ms: float) -> None:
    """Sixteen rows that make their last ten tokens. Where so many were there all the time, others
    come for them; where they came just now, the engine is free after that."""
    rig = crowd(600_000, tokens=10)
    rig.schedule.count("m")
    rig.clock.advance(seconds)
    prospect = rig.schedule.of(rig.task(600_000, 100, prompt=1))
    assert prospect.end_ms[8] == pytest.approx(13.0 * 10 + step_ms * 100, rel=0.05)


def test_dl7_how_many_come_is_uncertain() -> None:
    """Ten rows are usual, with a standard deviation of three; each adds 1 ms to a step."""
    asked = Asked(0, (100.0,), 0.0, 0, 1e6, 1e6, 1e6, 1e6, context_tokens=0)
    alone = play([asked], machine_of(1.0, 1.0, 64)).end_ms
    played = play([asked, *[asked._replace(left=(1.0,))] * 9], machine_of(1.0, 1.0, 64, usual=10))
    ends = sorted(played.end_ms[:, 0])
    assert max(alone.ravel()) == pytest.approx(200)
    assert ends[8] == pytest.approx(1100, rel=0.06)
    assert ends[-1] - ends[0] == pytest.approx(2 * 1.86 * 3 * 100, rel=0.05)


def test_dl7_those_who_come_have_the_usual_contexts() -> None:
    """The last row is the longest: fifteen more of its kind would take another 15 ms a step."""
    asked = [Asked(n, (10.0,), 0.0, 0, 1e6, 1e6, 1e6, 1e6, context_tokens=0) for n in range(15)]
    asked.append(Asked(15, (100.0,), 0.0, 0, 1e6, 1e6, 1e6, 1e6, context_tokens=1600))
    machine = machine_of(5.0, 0.5, 16, usual=16, context_token_ms=0.01)
    own_ms, others_ms = 0.01 * 1650, 0.01 * 15 * 100
    expected = 10 * (13.0 + own_ms) + 90 * (13.0 + own_ms + others_ms)
    assert play(asked, machine).end_ms[8, 15] == pytest.approx(expected, rel=0.02)


def test_dl15_what_would_cost_others_more_than_it_gets_is_refused() -> None:
    """Five rows are just in time; a prompt of a second would make all of them late."""
    rig = five_that_are_just_in_time()
    prospect = rig.schedule.of(rig.task(10_000, 10, prompt=10_000))
    assert prospect.chance == 1 and prospect.gain < 0


def test_dl15_what_delays_others_for_long_counts_for_those_that_come_meanwhile() -> None:
    """One of five short answers is just in time: alone that is half a request, but a stay of eight
    seconds delays one after the other, where not all are met."""
    rig = new_rig()
    for left_ms in (800, *[2000] * 4):
        runs(rig, rig.task(left_ms, 100))
    long = rig.task(10_000, 1000, prompt=1)
    before = rig.schedule.of(long)
    assert before.chance == 1 and before.gain >= 0.5
    for outcome in (Outcome.MET, Outcome.MISSED) * 8:
        ended = rig.task(1000, 100, prompt=1)
        rig.schedule.offered(ended)
        ended.completion_tokens = 100
        ended.end(Ending(outcome, FinishReason.STOP), rig.clock.now())
    rig.clock.advance(0.02)
    assert rig.schedule.of(long).gain < 0.1


def test_or24_a_tenants_flood_outweighs_nobody() -> None:
    rig = five_that_are_just_in_time(tenant="flood")
    mine = rig.task(10_000, 10, prompt=10_000, tenant="small")
    assert rig.schedule.of(mine).gain > 0
    assert rig.schedule.of(rig.task(10_000, 10, prompt=10_000, tenant="flood")).gain < 0


def test_dl8_batch_work_waits_rather_than_cost_anybody() -> None:
    rig = five_that_are_just_in_time()
    batch = rig.task(10_000, 10, prompt=10_000, priority=Priority.BATCH)
    assert rig.schedule.of(batch).gain == rig.schedule.of(batch).chance


def test_dl8_interactive_work_finds_no_batch_work_in_its_way() -> None:
    """Sixteen batch rows make steps of 13 ms; alone it takes 5.5 ms a token."""
    rig = crowd(priority=Priority.BATCH)
    rig.schedule.may_free_row = lambda task: False
    assert rig.schedule.of(rig.task(800, 100, prompt=1)).chance == 1
    assert rig.refuses(rig.task(800, 100, prompt=1, priority=Priority.BATCH))


def test_dl7_an_answer_that_is_cut_needs_its_first_token() -> None:
    rig = new_rig()
    task = rig.task(200, 1000, prompt=1000, on_deadline=OnDeadline.PARTIAL)
    assert rig.schedule.of(task).chance == 1
    assert rig.refuses(rig.task(90, 1000, prompt=1000, on_deadline=OnDeadline.PARTIAL))


def test_dl7_ignorance_refuses_nobody() -> None:
    rig = Rig(UNKNOWN, least_chance=0.5)
    assert not rig.refuses(rig.task(20, 10_000))


def test_dl7_what_was_measured_at_load_refuses() -> None:
    """Doubted where the processors were others' meanwhile: a much faster machine is possible."""
    at_load = replace(PACE, fastest_ms=0.0, bends=tuple(float(rows) for rows in range(17)))
    calm, busy = (Rig(replace(at_load, spread=by), least_chance=0.1) for by in (0.1, 1.6))
    for rig, refuses in ((calm, True), (busy, False)):
        assert rig.refuses(rig.task(2000, 1000, prompt=1)) is refuses
        assert not rig.refuses(rig.task(7000, 1000, prompt=1))


def test_dl7_without_a_least_chance_only_what_is_certain_is_refused() -> None:
    rig = new_rig(least_chance=0.0)
    assert let_in(rig, [rig.task(1000, 100, prompt=1) for _ in range(16)]) == 16


def test_dl16_a_start_is_when_the_rows_before_are_free() -> None:
    rig = new_rig()
    assert rig.schedule.start_ms(rig.task(1000)) == 0
    for number in range(16):
        runs(rig, rig.task(60_000, 100 + number))
    waiting = rig.task(60_000, 10, prompt=1)
    rig.queue.push(waiting)
    start_ms = rig.schedule.start_ms(waiting)
    assert start_ms == pytest.approx(99 * 13.0, rel=0.05)
    assert rig.schedule.room_ms("m") == pytest.approx(start_ms, rel=0.05)


def test_or14_what_is_left_of_a_job_ends_at_its_deadline_at_the_latest() -> None:
    rig = new_rig()
    tasks = [runs(rig, rig.task(60_000, 101)) for _ in range(16)]
    assert rig.schedule.left_ms(tasks[0]) == pytest.approx(100 * 13.0, rel=0.05)
    elsewhere = rig.task(60_000, 101)
    elsewhere.completion_tokens = 1
    assert rig.schedule.left_ms(elsewhere) == pytest.approx(100 * 13.0, rel=0.05)
    assert rig.schedule.left_ms(runs(rig, rig.task(500, 101))) == pytest.approx(500, abs=1)


def test_dl7_a_refusal_names_the_gap_that_cannot_be_kept_or_that_others_would_be_late() -> None:
    rig = new_rig()
    task = rig.task(60_000, 100, prompt=1, parts=Parts(math.inf, 0.002))
    with pytest.raises(DeadlineInfeasible, match="tokens cannot come 2 ms apart") as refusal:
        rig.admission.finish(task)
    assert refusal.value.details["part"] == "token_gap"
    for _ in range(5):
        runs(rig, rig.task(800, 100))
    with pytest.raises(DeadlineInfeasible, match="and make others late") as refusal:
        rig.admission.finish(rig.task(10_000, 10, prompt=10_000))
    assert refusal.value.details["binding_constraint"] == "queue"
    assert "part" not in refusal.value.details
