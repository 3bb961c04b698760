"""Runs of which nobody says how many calls they have: what is learnt, and what a call may take."""

import itertools

import pytest

from orchestrator.errors import QueueFull
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import TellTime
from orchestrator.tasks.prompt_kind import PromptKind
from orchestrator.tasks.run_lengths import RunLengths, RunWatch
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import refused
from orchestrator.telemetry.trace_context import TraceContext
from protocol import FinishReason, Outcome
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.jobs import make_job

AGENT = ((), ("tenant",), ("tenant", "agent"))


def learnt(*lengths: int, ended: bool = True) -> RunLengths:
    found = RunLengths()
    for calls in lengths:
        found.add(AGENT, calls, ended=ended)
    return found


def test_an_agent_seen_seldom_leans_on_its_tenant() -> None:
    lengths = RunLengths()
    for _ in range(40):
        lengths.add((*AGENT[:2], ("tenant", "known")), 5, ended=True)
    stranger = (*AGENT[:2], ("tenant", "new"))
    assert lengths.to_come(stranger, 1).calls == pytest.approx(4, abs=0.6)
    for _ in range(40):
        lengths.add(stranger, 1, ended=True)
    assert lengths.to_come(stranger, 1).calls < 0.5


class Bench:
    """Agents that make calls of two seconds, with half a second between them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = RunWatch(self.clock)
        self._numbers = itertools.count()

    def call(
        self,
        session: str,
        due_at: float,
        *,
        trace: str = "",
        calls_left: int | None = None,
        states_deadline: bool = True,
        tells: bool = False,
        tenant: str = "t",
    ) -> Task:
        job = make_job(
            deadline=Deadline(due_at, 0, is_default=not states_deadline),
            arrived=self.clock.now(),
            tenant=tenant,
            session_id=session,
            trace=TraceContext(trace, "1" * 16, False) if trace else None,
            calls_left=calls_left,
            tell_time=TellTime() if tells else None,
        )
        task = Task(f"t{next(self._numbers)}", job)
        task.prompt_kind = PromptKind(b"instructions")
        self.watch.begin(task)
        return task

    def end(self, task: Task, ending: Ending | None = None) -> None:
        task.end(ending or Ending(Outcome.MET, FinishReason.STOP), self.clock.now())

    def run(self, calls: int, *, trace: str = "") -> list[float]:
        """A whole run under one deadline; what was to come after each call."""
        name, due_at = f"run {next(self._numbers)}", self.clock.now() + 60
        seen = []
        for _ in range(calls):
            task = self.call("" if trace else name, due_at, trace=trace and name)
            seen.append(task.calls_left)
            self.clock.advance(2)
            self.end(task)
            self.clock.advance(0.5)
        self.clock.advance(62 - 2.5 * calls)
        return seen


@for_each("trace", ["", "by trace"])
def test_dl22_a_runs_calls_get_shares_without_being_told_how_many_there_are(trace: str) -> None:
    bench = Bench()
    assert bench.run(4, trace=trace) == [0, 0, 0, 0]
    for _ in range(20):
        seen = bench.run(4, trace=trace)
    assert seen == pytest.approx([3, 2, 1, 0], abs=0.4)
    due_at = bench.clock.now() + 60
    task = bench.call("s", due_at)
    # Three more calls, and half a second before each of them.
    assert task.share_ms(bench.clock.now()) == pytest.approx((60_000 - 1500) / 4, rel=0.08)


def test_a_conversation_whose_turns_have_deadlines_of_their_own_is_no_run() -> None:
    bench = Bench()
    for _ in range(40):
        task = bench.call("s", bench.clock.now() + 10)
        assert not task.calls_left
        bench.clock.advance(2)
        bench.end(task)
        bench.clock.advance(5)


def test_calls_side_by_side_are_one_step_of_a_run() -> None:
    bench = Bench()
    for number in range(20):
        due_at = bench.clock.now() + 20
        for task in [bench.call(f"s{number}", due_at) for _ in range(5)]:
            assert not task.calls_left
            bench.end(task)
        bench.clock.advance(25)


def test_who_says_how_many_are_to_come_or_states_no_deadline_is_not_second_guessed() -> None:
    bench = Bench()
    for _ in range(10):
        bench.run(4)
    due_at = bench.clock.now() + 60
    assert bench.call("a", due_at, calls_left=7).calls_left == 7
    assert bench.call("b", due_at, states_deadline=False).calls_left == 0
    assert bench.call("c", due_at, tells=True).calls_left == 0, "its model is told when to finish"
    assert bench.call("", due_at).calls_left == 0


def test_a_run_that_failed_does_not_teach_that_runs_are_short() -> None:
    bench = Bench()
    for _ in range(15):
        bench.run(4)
    for _ in range(15):
        task = bench.call(f"failed {bench.clock.now()}", bench.clock.now() + 10)
        bench.end(task, refused(QueueFull("full")))
        bench.clock.advance(12)
    assert bench.run(4)[0] == pytest.approx(3, abs=0.5)


def test_tenants_do_not_learn_from_each_other_for_long() -> None:
    bench = Bench()
    for _ in range(15):
        bench.run(4)
    for _ in range(30):
        due_at = bench.clock.now() + 10
        bench.end(bench.call(f"{due_at}", due_at, tenant="other"))
        bench.clock.advance(12)
    assert bench.call("s", bench.clock.now() + 60, tenant="other").calls_left < 0.4
