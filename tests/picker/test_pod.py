"""A pod's load and pace, from metrics of a moment ago and from what was routed to it."""

from dataclasses import replace

import pytest

from orchestrator.prediction.urgency import Due
from picker.choice import Needs
from picker.pod import AnswerEnd, Flight, Pod
from picker.vllm_page import VllmPage
from protocol import CERTAIN_AFTER_STEPS

PAGE = VllmPage(running=0, waiting=0)
STATED = Needs(10, [50.0] * 16, 50, Due(1e6))


def flight(at: float = 0.0, tokens: int = 20) -> Flight:
    return Flight(at, prompt_tokens=10, output_tokens=tokens)


def told(pod: Pod, step: int, step_ms: float, rows: int = 1) -> None:
    """A page after ``step`` hundreds of steps of ``step_ms`` with ``rows`` rows."""
    steps = 100 * step
    page = VllmPage(
        running=rows,
        waiting=0,
        steps=steps,
        gaps=steps * rows,
        gaps_s=steps * rows * step_ms / 1000,
        tokens=steps * rows,
    )
    pod.take_page(page, float(step), float(step))


def test_ours_count_at_once_and_others_once_two_polls_tell_of_them() -> None:
    pod = Pod("a")
    mine = [flight(), flight()]
    for one in mine:
        pod.add(one)
    assert pod.load == 2
    pod.take_page(replace(PAGE, running=2), 1.0, 1.0)
    assert pod.load == 2
    pod.take_page(replace(PAGE, running=6, waiting=1), 2.0, 2.0)
    assert pod.load == 2
    pod.take_page(replace(PAGE, running=6, waiting=1), 3.0, 3.0)
    assert pod.load == 7
    pod.flights.discard(mine[0])
    assert pod.load == 6


def test_jobs_that_wait_show_how_many_run_at_once() -> None:
    """Twice in a row: one that has just come waits for a moment on an idle pod, too."""
    pod = Pod("a")
    assert pod.prospect(0.0).candidate.slots == 64
    pod.take_page(replace(PAGE, running=3, waiting=1), 1.0, 1.0)
    assert pod.prospect(1.0).candidate.slots == 64
    for at in (2.0, 3.0):
        pod.take_page(replace(PAGE, running=8, waiting=5), at, at)
    assert pod.prospect(3.0).candidate.slots == 8
    pod.take_page(replace(PAGE, running=12), 4.0, 4.0)
    assert pod.prospect(4.0).candidate.slots == 12


def test_metrics_tell_the_pace_and_what_is_certain() -> None:
    pod = Pod("a")
    for step in range(4):
        told(pod, step, 10.0)
    prospect = pod.prospect(4.0)
    assert prospect.pace is not None
    assert prospect.pace.step_ms(1) == pytest.approx(10.0, rel=0.1)
    assert prospect.finish_ms(STATED) == pytest.approx(500.0, rel=0.2)
    # 0.8 of the fastest step, for every token that the client insists on.
    assert 300.0 < prospect.least_ms(STATED) <= 400.0
    told(pod, 0, 10.0)  # another process: its totals begin again
    assert pod.prospect(4.0).pace == prospect.pace


def test_answers_tell_the_pace_of_a_pod_whose_metrics_do_not() -> None:
    pod = Pod("a")
    now = 0.0
    for number in range(CERTAIN_AFTER_STEPS + 2):
        one = flight(now)
        pod.add(one)
        pod.take_page(replace(PAGE, running=1), now, now)
        one.first_at, one.tokens = now + 0.05, 40
        now += 0.05 + 39 * 0.02 * (1 + 0.01 * (number % 5))
        assert pod.prospect(now).least_ms(STATED) == 0.0 or number >= CERTAIN_AFTER_STEPS
        pod.ended(one, AnswerEnd(40, 10), now)
    prospect = pod.prospect(now)
    assert prospect.pace is not None
    assert prospect.pace.step_ms(1) == pytest.approx(20.0, rel=0.15)
    assert 500.0 < prospect.least_ms(STATED) <= 0.8 * 20.5 * 50
    assert pod.load == 0


def test_metrics_grow_stale() -> None:
    pod = Pod("a")
    assert not pod.prospect(0.0).is_known
    pod.take_page(PAGE, 1.0, 1.0)
    assert pod.prospect(6.0).is_known
    pod.fault, pod.is_reachable = "cannot connect", False
    late = pod.prospect(6.1)
    assert not late.is_known and not late.is_reachable
