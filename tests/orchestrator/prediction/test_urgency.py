"""DL-8's rule: chances never fall with time, least slack first with room, density without."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prediction.urgency import LOST, SURE, Costs, Due, Urgency, urgency

COSTS = Costs(prompt_ms=1.0, token_ms=10.0, token_work_ms=1.25, start_ms=0.0)
AMPLE = 1e6

lefts = st.lists(st.floats(1, 2000), min_size=1, max_size=16).map(sorted)
costs = st.builds(
    Costs,
    prompt_ms=st.floats(0.001, 10),
    token_ms=st.floats(0.1, 100),
    token_work_ms=st.floats(0.01, 10),
    start_ms=st.floats(0, 50),
    plain_token_ms=st.floats(0.1, 100),
)
waits = st.floats(50, 1e5)
times = st.floats(-1000, 1e6)


def of(left: list[float], whole_ms: float, wait_ms: float = 100.0, **due: float) -> Urgency:
    return urgency(left, 10, Due(whole_ms, **due), COSTS, wait_ms)


@given(lefts, st.floats(0, 4000), times, st.floats(0, 1e5), costs, waits)
def test_more_time_is_never_less_chance(
    left: list[float], prompt: float, whole: float, more: float, costs: Costs, wait: float
) -> None:
    now, later = (urgency(left, prompt, Due(ms), costs, wait) for ms in (whole, whole + more))
    assert 0 <= now.chance <= later.chance + 1e-9
    assert later.chance <= 1 + 1e-9
    ample = urgency(left, prompt, Due(1e12), costs, wait)
    assert ample.chance == pytest.approx(1)


@given(lefts, st.floats(0, 4000), times, costs, waits)
def test_every_urgency_is_a_number_and_hopeless_work_has_none(
    left: list[float], prompt: float, whole: float, costs: Costs, wait: float
) -> None:
    found = urgency(left, prompt, Due(whole), costs, wait)
    assert found.work_ms > 0 and math.isfinite(found.work_ms)
    assert not math.isnan(found.log_urgency) and found.log_urgency < math.inf
    assert (found.chance == 0) == (found.log_urgency == -math.inf)
    first_ms = costs.start_ms + prompt * costs.prompt_ms
    least_ms = first_ms + left[0] * costs.token_ms
    if whole < 0.99 * LOST * (first_ms + left[0] * min(costs.token_ms, costs.plain_token_ms)):
        assert found.chance == 0
    if whole > 1.01 * SURE * (least_ms + left[-1] * costs.token_ms):
        assert found.chance == pytest.approx(1)


def test_what_would_be_late_among_prompts_may_be_in_time_without_them() -> None:
    """A hundred tokens of 10 ms, of which prompts of others take 6, with 0.6 s left."""
    assert of([100.0], 610.0).chance == 0
    without = replace(COSTS, plain_token_ms=4.0)
    small, less = (urgency([100.0], 10, Due(ms), without, 100.0).chance for ms in (610.0, 460.0))
    assert 0 < less < small < 0.2


def test_rounding_at_the_edge_of_hope_is_no_error() -> None:
    costs = Costs(1.0, 35.47104262175486, 3.0, 0.0)
    found = urgency((1989.3824438937572,) * 16, 0, Due(42339.281674995786), costs, 50.0)
    assert (found.chance, found.log_urgency) == (0.0, -math.inf)


@given(lefts, st.floats(1, 10_000), waits)
def test_work_is_never_more_than_up_to_the_deadline(
    left: list[float], whole: float, wait: float
) -> None:
    """What does not end by then is stopped there."""
    found = urgency(left, 0, Due(whole), COSTS, wait)
    tokens = max(1.0, whole / COSTS.token_ms)
    assert found.work_ms <= tokens * COSTS.token_work_ms * (1 + 1e-9)
    ample = urgency(left, 0, Due(1e12), COSTS, wait)
    mean = sum(left) / len(left)
    assert ample.work_ms == pytest.approx(mean * COSTS.token_work_ms)


@given(st.lists(st.floats(1.2, 50), min_size=2, max_size=8, unique=True))
def test_with_hardly_any_wait_it_is_least_slack_first(patience: list[float]) -> None:
    """Whatever the sizes: somebody who can wait waits."""
    rng = random.Random(4)
    jobs = []
    for factor in patience:
        tokens = rng.randint(10, 1000)
        needed_ms = 10 + 10 * tokens
        jobs.append((needed_ms * (factor - 1), of([tokens], needed_ms * factor, 0.05)))
    jobs.sort(key=lambda job: -job[1].log_urgency)
    slacks = [slack for slack, _ in jobs]
    for before, after in pairwise(slacks):
        assert before <= after + 1  # ms: what is left to the density when slacks are equal


@given(st.lists(st.integers(1, 2000), min_size=2, max_size=8, unique=True), st.randoms())
def test_with_a_long_wait_it_is_density(tokens: list[int], rng: random.Random) -> None:
    """All can be in time by themselves, not all together: the least work first."""
    jobs = [(count, of([count], 20 * count + rng.uniform(1e2, 1e4), 1e9)) for count in tokens]
    assert all(found.chance == 1 for _, found in jobs)
    jobs.sort(key=lambda job: -job[1].log_urgency)
    assert [count for count, _ in jobs] == sorted(tokens)


def test_dl14_a_first_token_that_is_due_is_urgent_and_one_that_is_lost_hopeless() -> None:
    whole, soon, lost = (
        of([50], AMPLE, 100.0, **due)
        for due in ({}, {"next_token_ms": 60.0}, {"next_token_ms": 5.0})
    )
    assert soon.chance == whole.chance == 1
    assert soon.log_urgency > whole.log_urgency
    assert lost == Urgency(0.0, -math.inf, lost.work_ms)
    # Parts alone, as most clients of a stream state them.
    parts = of([50], math.inf, 100.0, next_token_ms=60.0)
    assert parts.chance == 1 and parts.log_urgency == pytest.approx(soon.log_urgency)
