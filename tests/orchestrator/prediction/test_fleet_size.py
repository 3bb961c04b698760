"""How many instances a load needs (PF-7)."""

import math
from dataclasses import replace

import pytest

from orchestrator.prediction.fleet_size import OfferedLoad, PlanError, estimate, plan_fleet
from orchestrator.prediction.step_model import StepModel, Work

MODEL = StepModel(slots=8, step_tokens=512, base_ms=10.0, row_ms=1.0, prompt_token_ms=0.01)
WORK = Work(100, 0, 50)


def test_one_server_is_the_queue_that_textbooks_solve() -> None:
    """With one slot it is M/D/1: of P(wait = 0) = 1 - load, and of a deadline that leaves no room
    for any wait nothing else is kept. Requests that would be late do not hold the slot."""
    alone = StepModel(slots=1, step_tokens=512, base_ms=10.0, row_ms=0.0, prompt_token_ms=0.0)
    service_ms = 10.0 * 20
    for load in (0.2, 0.5, 0.8):
        offered = OfferedLoad(load * 1000 / service_ms, service_ms + 1e-3, Work(1, 0, 20))
        # Erlang's loss formula with one server: what finds it taken is lost.
        assert estimate(alone, offered, 1).kept == pytest.approx(1 / (1 + load), abs=0.03)
    patient = OfferedLoad(0.5 * 1000 / service_ms, 100 * service_ms, Work(1, 0, 20))
    found = estimate(alone, patient, 1)
    assert found.kept == 1.0 and found.busy == pytest.approx(0.5, abs=0.03)
    # P(wait <= x) of M/D/1 by Erlang's sum; at x = 2 services and half load.
    load, x = 0.5, 2.0
    below = (1 - load) * sum(
        (load * (k - x)) ** k / math.factorial(k) * math.exp(-load * (k - x)) for k in range(3)
    )
    assert below == pytest.approx(0.95, abs=0.02)
    assert found.wait_p95_ms == pytest.approx(2 * service_ms, rel=0.2)


def test_more_load_needs_more_and_a_longer_deadline_fewer() -> None:
    loads = [OfferedLoad(per_s, 2500.0, WORK) for per_s in (5.0, 15.0, 45.0)]
    needed = [plan_fleet(MODEL, load).enough for load in loads]
    counts = [found.instances for found in needed]
    assert counts == sorted(set(counts))
    assert all(found.kept >= 0.99 for found in needed)
    assert estimate(MODEL, loads[-1], counts[-1] - 2).kept < 0.99
    tight = replace(loads[-1], deadline_ms=700.0)
    assert plan_fleet(MODEL, tight).enough.instances > counts[-1]


def test_a_tenth_more_is_told() -> None:
    plan = plan_fleet(MODEL, OfferedLoad(200.0, 2000.0, WORK))
    assert plan.with_more.instances == plan.enough.instances
    assert plan.with_more.kept < plan.enough.kept
    assert plan.enough_for_more.instances > plan.enough.instances
    assert plan.enough_for_more.kept >= 0.99


def test_long_prompts_take_their_time() -> None:
    load = OfferedLoad(5.0, 3000.0, Work(8, 0, 50))
    long = replace(load, work=Work(1500, 0, 50))
    slow = replace(MODEL, prompt_token_ms=0.05)
    assert plan_fleet(slow, long).enough.instances > plan_fleet(slow, load).enough.instances


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (OfferedLoad(1.0, 500.0, WORK), r"takes 0\.55 s on an instance of its own.* is 0\.50 s"),
        (OfferedLoad(1e6, 1000.0, WORK), "more than 4096 instances"),
    ],
)
def test_what_cannot_be_kept_is_said(load: OfferedLoad, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_fleet(MODEL, load)
