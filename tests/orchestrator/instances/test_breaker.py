"""DL-11: who is charged, who is not, and how many instances may rest."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.instances.breaker import BreakerConfig, Breakers, BreakerState, JobEnd, Ticket
from tests.support.clock import ManualClock

NAMES = ("a:1", "b:1", "c:1", "d:1")


def make(*names: str) -> tuple[Breakers, ManualClock]:
    clock = ManualClock()
    return Breakers(lambda name: names, clock.now), clock


def run(
    breakers: Breakers,
    name: str,
    end: JobEnd,
    predicted_ms: float = 100.0,
    actual_ms: float = 100.0,
    times: int = 1,
) -> bool:
    opened = False
    for _ in range(times):
        ticket = breakers.begin(name)
        opened |= breakers.end(ticket, end, predicted_ms=predicted_ms, actual_ms=actual_ms)
    return opened


def is_open(breakers: Breakers, name: str = "a:1") -> bool:
    return breakers.state(name) is BreakerState.OPEN


def test_dl11_one_that_far_exceeds_its_prediction_rests() -> None:
    breakers, _ = make(*NAMES)
    assert run(breakers, "a:1", JobEnd.FINISHED, 100, 1000, times=5)
    assert is_open(breakers)
    assert not breakers.admits("a:1")
    assert breakers.admits("b:1")
    assert breakers.ejections == {"a:1": 1}


@pytest.mark.parametrize(
    ("end", "predicted_ms", "actual_ms"),
    [
        (JobEnd.DEADLINE, 1000.0, 10.0),  # the client's deadline was tight
        (JobEnd.DEADLINE, 1000.0, 1000.0),
        (JobEnd.ABORTED, 100.0, 10_000.0),  # cancelled or disconnected, however late
        (JobEnd.REFUSED, 100.0, 10_000.0),
        (JobEnd.FINISHED, 100.0, 299.0),
        (JobEnd.FINISHED, 1.0, 100.0),  # little, if many times as long
        (JobEnd.FINISHED, 0.0, 10_000.0),  # nothing was predicted
    ],
)
def test_dl11_what_the_instance_cannot_help_is_never_charged(
    end: JobEnd, predicted_ms: float, actual_ms: float
) -> None:
    breakers, _ = make(*NAMES)
    assert not run(breakers, "a:1", end, predicted_ms, actual_ms, times=100)
    assert breakers.state("a:1") is BreakerState.CLOSED


def test_dl11_a_deadline_does_not_excuse_one_that_was_slow_as_well() -> None:
    breakers, _ = make(*NAMES)
    assert run(breakers, "a:1", JobEnd.DEADLINE, 100, 5000, times=5)


def test_dl11_tight_deadlines_among_slow_jobs_dilute_nothing() -> None:
    """What tells nothing does not count as good either."""
    breakers, _ = make(*NAMES)
    run(breakers, "a:1", JobEnd.FINISHED, 100, 1000, times=4)
    run(breakers, "a:1", JobEnd.DEADLINE, 1000, 10, times=100)
    assert run(breakers, "a:1", JobEnd.FINISHED, 100, 1000)


def test_errors_are_charged() -> None:
    breakers, _ = make(*NAMES)
    run(breakers, "a:1", JobEnd.FINISHED, times=5)
    assert not run(breakers, "a:1", JobEnd.FAILED, times=4)
    assert run(breakers, "a:1", JobEnd.FAILED)


def test_a_lane_that_breaks_counts_once_however_many_jobs_it_had() -> None:
    breakers, clock = make(*NAMES)
    assert not run(breakers, "a:1", JobEnd.LOST, times=100)
    for _ in range(3):
        clock.advance(2)
        assert not run(breakers, "a:1", JobEnd.LOST, times=100)
    clock.advance(2)
    assert run(breakers, "a:1", JobEnd.LOST, times=100)  # the fifth time


def test_a_model_that_is_wrong_everywhere_ejects_nobody() -> None:
    breakers, _ = make(*NAMES)
    for _ in range(50):
        for name in NAMES[1:]:
            run(breakers, name, JobEnd.FINISHED, 100, 290)
    assert not run(breakers, "a:1", JobEnd.FINISHED, 100, 800, times=50)
    assert run(breakers, "a:1", JobEnd.FINISHED, 100, 3000, times=50)


def test_at_most_a_share_rests_and_never_the_last() -> None:
    breakers, _ = make(*NAMES)
    for name in NAMES:
        run(breakers, name, JobEnd.FAILED, times=30)
    assert [is_open(breakers, name) for name in NAMES] == [True, True, False, False]
    alone, _ = make("a:1")
    assert not run(alone, "a:1", JobEnd.FAILED, times=100)


def test_one_that_rests_is_used_when_its_peers_are_gone() -> None:
    clock = ManualClock()
    ready = ["a:1", "b:1"]
    breakers = Breakers(lambda name: ready, clock.now)
    run(breakers, "a:1", JobEnd.FAILED, times=5)
    assert not breakers.admits("a:1")
    ready.remove("b:1")
    assert breakers.admits("a:1")


def test_half_open_lets_few_probes_through_and_closes_when_they_go_well() -> None:
    breakers, clock = make(*NAMES)
    run(breakers, "a:1", JobEnd.FAILED, times=5)
    clock.advance(4.9)
    assert not breakers.admits("a:1")
    clock.advance(0.2)
    assert breakers.state("a:1") is BreakerState.HALF_OPEN
    tickets = []
    while breakers.admits("a:1"):
        tickets.append(breakers.begin("a:1"))
    assert len(tickets) == BreakerConfig().probes
    for ticket in tickets:
        breakers.end(ticket, JobEnd.FINISHED, predicted_ms=100, actual_ms=100)
    run(breakers, "a:1", JobEnd.ABORTED, times=3)  # frees its place, proves nothing
    assert breakers.state("a:1") is BreakerState.HALF_OPEN
    run(breakers, "a:1", JobEnd.FINISHED)
    assert breakers.state("a:1") is BreakerState.CLOSED


def test_a_probe_that_is_charged_doubles_the_rest_up_to_the_most() -> None:
    breakers, clock = make(*NAMES)
    run(breakers, "a:1", JobEnd.FAILED, times=5)
    for rest_s in (5, 10, 20, 40, 60, 60):
        clock.advance(rest_s - 0.1)
        assert is_open(breakers)
        clock.advance(0.2)
        assert run(breakers, "a:1", JobEnd.FAILED)


def test_jobs_from_before_a_rest_say_nothing_after_it() -> None:
    breakers, clock = make(*NAMES)
    old = [breakers.begin("a:1") for _ in range(3)]
    run(breakers, "a:1", JobEnd.FAILED, times=5)
    breakers.end(old[0], JobEnd.FAILED, predicted_ms=100, actual_ms=100)
    clock.advance(5.1)
    assert breakers.admits("a:1")
    breakers.end(old[1], JobEnd.FAILED, predicted_ms=100, actual_ms=100)
    assert breakers.state("a:1") is BreakerState.HALF_OPEN
    run(breakers, "a:1", JobEnd.FINISHED, times=3)
    assert breakers.state("a:1") is BreakerState.CLOSED
    assert not breakers.end(old[2], JobEnd.FAILED, predicted_ms=100, actual_ms=100)


def test_a_forgotten_instance_comes_back_with_a_clean_record() -> None:
    breakers, _ = make(*NAMES)
    run(breakers, "a:1", JobEnd.FAILED, times=5)
    breakers.forget("a:1")
    breakers.forget("a:1")
    assert breakers.admits("a:1")


class BreakersMachine(RuleBasedStateMachine):
    """Any jobs with any ends in any order, while instances come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.ready = list(NAMES)
        self.breakers = Breakers(lambda name: self.ready, self.clock.now)
        self.under_way: list[Ticket] = []
        self.guilty = False

    @rule(name=st.sampled_from(NAMES))
    def begins(self, name: str) -> None:
        if name in self.ready and self.breakers.admits(name):
            self.under_way.append(self.breakers.begin(name))

    @precondition(lambda self: self.under_way)
    @rule(
        data=st.data(),
        end=st.sampled_from(JobEnd),
        ratio=st.sampled_from([0.1, 1.0, 2.0, 50.0]),
        times=st.integers(1, 8),
    )
    def ends(self, data: st.DataObject, end: JobEnd, ratio: float, times: int) -> None:
        for _ in range(min(times, len(self.under_way))):
            ticket = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
            resting = self.resting()
            opened = self.breakers.end(ticket, end, predicted_ms=100, actual_ms=100 * ratio)
            charged = end in (JobEnd.FAILED, JobEnd.LOST) or (
                ratio == 50.0 and end in (JobEnd.FINISHED, JobEnd.DEADLINE)
            )
            assert charged or not opened  # DL-11
            self.guilty |= charged
            peers = len({*self.ready, ticket.instance})
            if opened and ticket.instance not in resting:
                assert len(resting & {*self.ready}) + 1 <= math.floor(peers / 2)

    @rule(seconds=st.sampled_from([0.5, 6.0, 70.0]))
    def waits(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(name=st.sampled_from(NAMES))
    def goes_or_comes(self, name: str) -> None:
        if name in self.ready:
            self.ready.remove(name)
        else:
            self.ready.append(name)

    def resting(self) -> set[str]:
        return {n for n in NAMES if self.breakers.state(n) is not BreakerState.CLOSED}

    @invariant()
    def somebody_always_works(self) -> None:
        assert not self.ready or any(self.breakers.admits(name) for name in self.ready)

    @invariant()
    def the_innocent_are_never_ejected(self) -> None:
        assert self.guilty or not self.resting()


BreakersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBreakers = BreakersMachine.TestCase
