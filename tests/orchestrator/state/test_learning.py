"""OR-18: what one orchestrator learns, the others know; and a run of calls has one deadline at all
of them."""

import random

import msgspec
import pytest

from orchestrator.prediction import LengthKey
from orchestrator.state import learning
from tests.orchestrator.conftest import Service
from tests.orchestrator.state.conftest import Sharing, see_each_other
from tests.support.fake_worker import FakeWorker

KEY = LengthKey("m", "t", 4096)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "EVERY_S", 0.05)
    monkeypatch.setattr(learning, "ASK_S", 0.0)


def answered(service: Service, middle: float, count: int, seed: int) -> None:
    rng, lengths = random.Random(seed), service.parts.forecaster.lengths
    for _ in range(count):
        tokens = max(1, round(middle * rng.lognormvariate(0, 0.4)))
        lengths.answered(KEY, tokens, finished=True)


def calls_of(service: Service) -> list[int]:
    """Calls to come of each run that an orchestrator knows."""
    by_key = service.orchestrator.runs._by_key
    return [run.calls for own in by_key.values() for run in own.values()]


def usual(service: Service) -> float:
    return service.parts.forecaster.lengths.curve(KEY).quantile(0.5, 0, 4096)


async def test_lengths_of_answers_are_learnt_together(sharing: Sharing, worker: FakeWorker) -> None:
    one, two = await sharing.member(worker), await sharing.member(worker)
    await see_each_other(one, two)
    answered(one, 300.0, 150, seed=1)
    answered(two, 300.0, 50, seed=2)
    await two.until(lambda: usual(two) == pytest.approx(usual(one), rel=0.1))
    new = await sharing.member(worker)
    await new.until(lambda: usual(new) == pytest.approx(300.0, rel=0.3))
    # Answers become others: all hear of it, and nobody's old counts bring the past back.
    answered(one, 20.0, 200, seed=3)
    for service in (two, new, one):
        await service.until(lambda service=service: usual(service) < 60.0)  # type: ignore[misc]


async def test_a_new_one_begins_with_what_is_known_of_an_instances_steps(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one = await sharing.member(worker)
    (instance,) = one.orchestrator.registry
    learner = instance.step_learner
    assert learner is not None
    worker.heartbeat_s = 3600.0
    for window in range(1, 200):
        rows = 1 + window % 8
        learner.observe(
            msgspec.structs.replace(
                worker.stats(),
                running=rows,
                steps_total=10 * window,
                tokens_total=10 * rows * window,
                busy_ms_total=10 * window * 12.5,
            )
        )
    two = await sharing.member(worker)
    (there,) = two.orchestrator.registry
    await two.until(
        lambda: there.step_learner is not None and there.step_learner.windows >= learner.windows
    )
    assert there.step_learner is not None
    assert there.step_learner.model.step_ms(4) == pytest.approx(learner.model.step_ms(4))
    assert there.step_learner.is_measured


async def test_a_run_has_one_deadline_at_all_members(sharing: Sharing, worker: FakeWorker) -> None:
    one, two = await sharing.member(worker), await sharing.member(worker)
    await see_each_other(one, two)
    call = {"prompt": "hi", "max_tokens": 2, "session_id": "a-trip"}
    first = call | {"calls_left": 2, "deadline_ms": 60_000}
    async with one.http.post("/v2/tasks", json=first) as response:
        assert response.status == 202
    await two.until(lambda: calls_of(two) == [2])
    async with two.http.post("/v2/tasks", json=call) as response:
        assert (response.status, response.headers["X-Deadline-Source"]) == (202, "run")
        left_ms = float(response.headers["X-Deadline-Budget"].rpartition("left=")[2])
        assert 30_000 < left_ms <= 60_000
    await one.until(lambda: calls_of(one) == calls_of(two) == [1])
