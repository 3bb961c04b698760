"""DL-11: what counts as a failure, what does not, and how many instances may be ejected."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.instances.breaker import (
    PROBES,
    WINDOW,
    Breakers,
    BreakerState,
    BreakerToken,
    JobResult,
    classify_end,
    record_end,
)
from orchestrator.instances.instance import Instance
from orchestrator.prediction.step_model import IDLE, Load, StepModel
from protocol import AbortCause, Code, End, FinishReason
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.paces import pace_of

NAMES = ("a:1", "b:1", "c:1", "d:1")


def make(*names: str) -> tuple[Breakers, ManualClock]:
    clock = ManualClock()
    return Breakers(lambda name: names, clock.now), clock


def run(
    breakers: Breakers,
    name: str,
    end: JobResult,
    predicted_ms: float = 100.0,
    actual_ms: float = 100.0,
    times: int = 1,
) -> bool:
    opened = False
    for _ in range(times):
        token = breakers.begin(name)
        opened |= breakers.end(token, end, predicted_ms=predicted_ms, actual_ms=actual_ms)
    return opened


def is_open(breakers: Breakers, name: str = "a:1") -> bool:
    return breakers.state(name) is BreakerState.OPEN


@for_each(
    ("end", "predicted_ms", "actual_ms"),
    [
        (JobResult.DEADLINE, 1000.0, 10.0),  # the client's deadline was tight
        (JobResult.DEADLINE, 1000.0, 1000.0),
        (JobResult.ABORTED, 100.0, 10_000.0),  # cancelled or disconnected, however late
        (JobResult.REFUSED, 100.0, 10_000.0),
        (JobResult.FINISHED, 100.0, 299.0),
        (JobResult.FINISHED, 1.0, 100.0),  # little, if many times as long
        (JobResult.FINISHED, 0.0, 10_000.0),  # nothing was predicted
    ],
)
def test_dl11_what_the_instance_cannot_help_never_counts(
    end: JobResult, predicted_ms: float, actual_ms: float
) -> None:
    breakers, _ = make(*NAMES)
    assert not run(breakers, "a:1", end, predicted_ms, actual_ms, times=100)
    assert breakers.state("a:1") is BreakerState.CLOSED


def test_dl11_tight_deadlines_among_slow_jobs_dilute_nothing() -> None:
    """What tells nothing does not count as good either."""
    breakers, _ = make(*NAMES)
    run(breakers, "a:1", JobResult.FINISHED, 100, 1000, times=4)
    run(breakers, "a:1", JobResult.DEADLINE, 1000, 10, times=100)
    assert run(breakers, "a:1", JobResult.FINISHED, 100, 1000)


def test_a_lane_that_breaks_counts_once_however_many_jobs_it_had() -> None:
    breakers, clock = make(*NAMES)
    assert not run(breakers, "a:1", JobResult.LOST, times=100)
    for _ in range(3):
        clock.advance(2)
        assert not run(breakers, "a:1", JobResult.LOST, times=100)
    clock.advance(2)
    assert run(breakers, "a:1", JobResult.LOST, times=100)  # the fifth time


def test_a_model_that_is_wrong_everywhere_ejects_nobody() -> None:
    breakers, _ = make(*NAMES)
    for _ in range(50):
        for name in NAMES[1:]:
            run(breakers, name, JobResult.FINISHED, 100, 290)
    assert not run(breakers, "a:1", JobResult.FINISHED, 100, 800, times=50)
    assert run(breakers, "a:1", JobResult.FINISHED, 100, 3000, times=50)


def test_at_most_a_share_is_ejected_and_never_the_last() -> None:
    breakers, _ = make(*NAMES)
    for name in NAMES:
        run(breakers, name, JobResult.FAILED, times=7)
    assert [is_open(breakers, name) for name in NAMES] == [True, True, False, False]
    alone, _ = make("a:1")
    for _ in range(30):
        assert not run(alone, "a:1", JobResult.FAILED, times=7)
        assert not run(alone, "a:1", JobResult.FINISHED)


def test_one_that_fails_everything_is_ejected_even_as_the_last() -> None:
    breakers, clock = make("a:1")
    assert run(breakers, "a:1", JobResult.FAILED, times=8)
    assert not breakers.admits("a:1")
    assert breakers.dark_s("a:1") == pytest.approx(5.0)
    run(breakers, "a:1", JobResult.FAILED, times=9)  # what was there when it opened
    clock.advance(5.1)
    assert breakers.dark_s("a:1") == 0 and breakers.admits("a:1"), "probes"
    assert run(breakers, "a:1", JobResult.FAILED)
    assert breakers.dark_s("a:1") == pytest.approx(10.0)
    clock.advance(10.1)
    run(breakers, "a:1", JobResult.FINISHED, times=3)
    assert breakers.state("a:1") is BreakerState.CLOSED and not breakers.dark_s("a:1")


def test_one_that_is_used_although_its_breaker_is_open_is_watched_all_the_same() -> None:
    clock = ManualClock()
    ready = ["a:1", "b:1"]
    breakers = Breakers(lambda name: ready, clock.now)
    run(breakers, "a:1", JobResult.FAILED, times=5)
    ready.remove("b:1")
    clock.advance(4.0)
    run(breakers, "a:1", JobResult.FAILED, times=2)
    assert breakers.admits("a:1"), "there is no other"
    run(breakers, "a:1", JobResult.FAILED)
    assert not breakers.admits("a:1")
    assert breakers.dark_s("a:1") == pytest.approx(5.0), "from now on"


def test_half_open_lets_few_probes_through_and_closes_when_they_go_well() -> None:
    breakers, clock = make(*NAMES)
    run(breakers, "a:1", JobResult.FAILED, times=5)
    clock.advance(4.9)
    assert not breakers.admits("a:1")
    clock.advance(0.2)
    assert breakers.state("a:1") is BreakerState.HALF_OPEN
    tokens = []
    while breakers.admits("a:1"):
        tokens.append(breakers.begin("a:1"))
    assert len(tokens) == PROBES
    for token in tokens:
        breakers.end(token, JobResult.FINISHED, predicted_ms=100, actual_ms=100)
    run(breakers, "a:1", JobResult.ABORTED, times=3)  # frees its place, proves nothing
    assert breakers.state("a:1") is BreakerState.HALF_OPEN
    run(breakers, "a:1", JobResult.FINISHED)
    assert breakers.state("a:1") is BreakerState.CLOSED


def test_a_probe_that_fails_doubles_the_open_time_up_to_the_most() -> None:
    breakers, clock = make(*NAMES)
    run(breakers, "a:1", JobResult.FAILED, times=5)
    for open_s in (5, 10, 20, 40, 60, 60):
        clock.advance(open_s - 0.1)
        assert is_open(breakers)
        clock.advance(0.2)
        assert run(breakers, "a:1", JobResult.FAILED)


def test_jobs_from_before_it_opened_say_nothing_after_it() -> None:
    breakers, clock = make(*NAMES)
    old = [breakers.begin("a:1") for _ in range(3)]
    run(breakers, "a:1", JobResult.FAILED, times=5)
    breakers.end(old[0], JobResult.FAILED, predicted_ms=100, actual_ms=100)
    clock.advance(5.1)
    assert breakers.admits("a:1")
    breakers.end(old[1], JobResult.FAILED, predicted_ms=100, actual_ms=100)
    assert breakers.state("a:1") is BreakerState.HALF_OPEN
    run(breakers, "a:1", JobResult.FINISHED, times=3)
    assert breakers.state("a:1") is BreakerState.CLOSED
    assert not breakers.end(old[2], JobResult.FAILED, predicted_ms=100, actual_ms=100)


class BreakersMachine(RuleBasedStateMachine):
    """Any jobs with any ends in any order, while instances come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.ready = list(NAMES)
        self.breakers = Breakers(lambda name: self.ready, self.clock.now)
        self.under_way: list[BreakerToken] = []
        self.has_failed = False

    @rule(name=st.sampled_from(NAMES))
    def begins(self, name: str) -> None:
        if name in self.ready and self.breakers.admits(name):
            self.under_way.append(self.breakers.begin(name))

    @precondition(lambda self: self.under_way)
    @rule(
        data=st.data(),
        end=st.sampled_from(JobResult),
        ratio=st.sampled_from([0.1, 1.0, 2.0, 50.0]),
        times=st.integers(1, 8),
    )
    def ends(self, data: st.DataObject, end: JobResult, ratio: float, times: int) -> None:
        for _ in range(min(times, len(self.under_way))):
            token = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
            ejected = self.ejected()
            opened = self.breakers.end(token, end, predicted_ms=100, actual_ms=100 * ratio)
            failed = end in (JobResult.FAILED, JobResult.LOST) or (
                ratio == 50.0 and end in (JobResult.FINISHED, JobResult.DEADLINE)
            )
            assert failed or not opened  # DL-11
            self.has_failed |= failed
            peers = len({*self.ready, token.instance})
            if opened and token.instance not in ejected:
                share = len(ejected & {*self.ready}) + 1 <= math.floor(peers / 2)
                assert share or self.is_dark(token.instance)

    @rule(seconds=st.sampled_from([0.5, 6.0, 70.0]))
    def waits(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(name=st.sampled_from(NAMES))
    def goes_or_comes(self, name: str) -> None:
        if name in self.ready:
            self.ready.remove(name)
        else:
            self.ready.append(name)

    def ejected(self) -> set[str]:
        return {n for n in NAMES if self.breakers.state(n) is not BreakerState.CLOSED}

    def is_dark(self, name: str) -> bool:
        return self.breakers._breakers[name].is_dark

    @invariant()
    def somebody_always_works_unless_all_fail_everything(self) -> None:
        lit = [name for name in self.ready if not self.is_dark(name)]
        assert not lit or any(self.breakers.admits(name) for name in self.ready)

    @invariant()
    def the_innocent_are_never_ejected(self) -> None:
        assert self.has_failed or not self.ejected()


BreakersMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=40)
TestBreakers = BreakersMachine.TestCase


# ── what real jobs' ends do to their instances' breakers ───────────────────────────────────────

TASK = {"prompt": "x", "max_tokens": 10}

PACE = pace_of(
    slots=8, step_tokens=512, base_ms=10.0, row_ms=0.0, prompt_token_ms=0.1, fastest_ms=10.0
)
"""100 tokens take about a second, 1.2 where things go badly."""


def make_end(reason: FinishReason, code: Code | None = None, tokens: int = 100) -> End:
    return End(1, reason, 10, tokens, 0.0, 0.0, 0.0, 0.0, code)


@dataclass
class Facts:
    breaker_token: BreakerToken
    cause: AbortCause | None = None
    basis: tuple[StepModel, Load] | None = (PACE, IDLE)
    dispatched_at: float = 100.0


@for_each(
    ("end", "cause", "how"),
    [
        (make_end(FinishReason.STOP), None, JobResult.FINISHED),
        (make_end(FinishReason.LENGTH), None, JobResult.FINISHED),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED), None, JobResult.DEADLINE),
        (make_end(FinishReason.DEADLINE), None, JobResult.DEADLINE),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_INFEASIBLE), None, JobResult.REFUSED),
        (make_end(FinishReason.CANCELLED, Code.CANCELLED), None, JobResult.ABORTED),
        (make_end(FinishReason.CANCELLED, Code.DRAINING), None, JobResult.ABORTED),
        (make_end(FinishReason.ERROR, Code.ENGINE_ERROR), AbortCause.DISCONNECT, JobResult.ABORTED),
        (make_end(FinishReason.ERROR, Code.ENGINE_ERROR), None, JobResult.FAILED),
        (make_end(FinishReason.ERROR, Code.QUEUE_FULL), None, JobResult.REFUSED),
        (make_end(FinishReason.ERROR, Code.INVALID_REQUEST), None, JobResult.REFUSED),
    ],
)
def test_dl11_how_a_job_ended(end: End, cause: AbortCause | None, how: JobResult) -> None:
    assert classify_end(end, cause) is how


@for_each(
    ("end", "took_s", "failed"),
    [
        (make_end(FinishReason.LENGTH), 1.0, False),
        (make_end(FinishReason.LENGTH), 3.0, False),
        (make_end(FinishReason.LENGTH), 10.0, True),
        # Stopped by a deadline: held against what its 5 tokens should have taken, no more.
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, tokens=5), 0.06, False),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, tokens=0), 0.2, False),
        (make_end(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, tokens=5), 3.0, True),
        (make_end(FinishReason.CANCELLED, Code.CANCELLED, tokens=1), 30.0, False),
    ],
)
def test_dl11_an_instance_is_held_to_its_own_prediction(
    end: End, took_s: float, failed: bool
) -> None:
    clock = ManualClock()
    breakers = Breakers(lambda name: ("a:1", "b:1"), clock.now)
    instance = Instance("a:1")
    for _ in range(WINDOW):
        record_end(breakers, instance, Facts(breakers.begin("a:1")), end, 100.0 + took_s)
    assert (breakers.state("a:1") is BreakerState.OPEN) is failed


async def test_dl11_an_instance_that_fails_is_ejected_and_the_other_works(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    workers = [await make_worker(), await make_worker()]
    service = await make_service(*workers)
    registry = service.orchestrator.registry
    bad, good = sorted(workers, key=lambda w: w.address)
    bad.plan = lambda submit: Plan(fail_at=1)
    for _ in range(5):
        await service.ask("POST", "/v1/completions", 502, json=TASK | {"model": "fake"})
    assert registry.breakers.state(bad.address) is BreakerState.OPEN
    for _ in range(5):
        await service.ask("POST", "/v1/completions", json=TASK | {"model": "fake"})
    assert (len(bad.submits), len(good.submits)) == (5, 5)
    assert service.metric("tidegate_ejections_total", instance=bad.address) == 1
    assert (
        service.metric("tidegate_breaker_state", instance=bad.address, state=BreakerState.OPEN) == 1
    )
    listed = (await service.ask("GET", "/v2/instances"))["instances"]
    states = {one["address"]: one["breaker"] for one in listed}
    assert states == {bad.address: "open", good.address: "closed"}
    assert service.outcomes() == ["failed"] * 5 + ["met"] * 5


async def test_an_only_instance_that_fails_everything_costs_8_errors_and_then_503s(
    service: Service, worker: FakeWorker
) -> None:
    async def answer() -> tuple[int, float]:
        async with service.http.post("/v1/completions", json=TASK | {"model": "fake"}) as response:
            return response.status, float(response.headers.get("Retry-After", "0"))

    worker.plan = lambda submit: Plan(fail_at=0)
    assert [await answer() for _ in range(8)] == [(502, 0)] * 8
    for _ in range(3):
        status, retry_after_s = await answer()
        assert status == 503 and 1 <= retry_after_s <= 5
    assert len(worker.submits) == 8
    service.parts.health.refresh()
    await service.ask("GET", "/health/ready", 503)
    worker.plan = lambda submit: Plan()
    service.leap(5.1)
    assert [(await answer())[0] for _ in range(3)] == [200] * 3
    assert service.orchestrator.registry.breakers.state(worker.address) is BreakerState.CLOSED
