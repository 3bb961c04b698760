"""One deadline for a whole run: who says how many calls are to come, and who inherits that."""

import itertools

from orchestrator.errors import QueueFull
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import TellTime
from orchestrator.tasks.runs import Runs
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import refused
from orchestrator.telemetry.trace_context import TraceContext
from protocol import FinishReason, Outcome
from tests.support.clock import ManualClock
from tests.support.jobs import make_job


class Bench:
    def __init__(self, max_runs: int = 100) -> None:
        self.clock = ManualClock()
        self.runs = Runs(self.clock, max_runs)
        self._arrivals = itertools.count(1)

    def call(
        self,
        calls_left: int | None = None,
        *,
        due_s: float | None = None,
        session: str = "s",
        trace: str = "",
        key: str = "k",
        arrived: float | None = None,
        tells: bool = False,
    ) -> Task:
        now = self.clock.now()
        job = make_job(
            deadline=Deadline(now + (300.0 if due_s is None else due_s), 0, is_default=not due_s),
            arrived=next(self._arrivals) if arrived is None else arrived,
            key=key,
            session_id=session,
            trace=TraceContext(trace, "1" * 16, False) if trace else None,
            calls_left=calls_left,
            tell_time=TellTime() if tells else None,
        )
        task = Task("t", self.runs.join(job))
        self.runs.follow(task)
        return task

    def end(self, task: Task, ending: Ending | None = None) -> None:
        task.end(ending or Ending(Outcome.MET, FinishReason.STOP), self.clock.now())


def test_the_first_call_speaks_for_the_run() -> None:
    bench = Bench()
    end_at = bench.clock.now() + 10
    seen = []
    for number in range(5):
        task = bench.call(3, due_s=10) if not number else bench.call()
        seen.append((task.calls_left, task.deadline.at == end_at))
        bench.end(task)
        bench.clock.advance(1)
    assert seen == [(3, True), (2, True), (1, True), (0, True), (0, False)]
    assert len(bench.runs) == 0


def test_what_a_call_says_itself_counts_from_then_on() -> None:
    bench = Bench()
    bench.end(bench.call(1, due_s=10))
    more = bench.call(4, due_s=20)
    assert (more.calls_left, more.deadline.at) == (4, bench.clock.now() + 20)
    bench.end(more)
    assert bench.call().calls_left == 3


def test_who_says_nothing_makes_no_run() -> None:
    """A conversation is no run: a deadline of an earlier turn is not the next one's."""
    bench = Bench()
    for calls_left in (None, 0):
        bench.end(bench.call(calls_left, due_s=10))
        assert len(bench.runs) == 0
        assert bench.call().deadline.is_default


def test_a_run_is_over_at_its_deadline() -> None:
    bench = Bench()
    bench.end(bench.call(3, due_s=10))
    bench.clock.advance(10)
    task = bench.call()
    assert (task.calls_left, task.deadline.is_default) == (0, True)
    assert len(bench.runs) == 0


def test_by_trace_or_session_and_nobody_elses() -> None:
    bench = Bench()
    bench.end(bench.call(3, due_s=10, trace="a" * 32))
    assert bench.call(session="", trace="a" * 32).calls_left == 2
    assert bench.call(session="s").calls_left == 1, "next to the one above"
    assert bench.call(session="", trace="b" * 32).calls_left == 0
    assert bench.call(key="other", trace="a" * 32).calls_left == 0
    assert bench.call(2, due_s=10, session="").calls_left == 2, "alone it still counts for itself"


def test_dl24_calls_side_by_side_are_one_step_of_their_run() -> None:
    """Five calls: one, three at once, one. The longest way through them has three."""
    bench = Bench()
    bench.end(bench.call(4, due_s=10))
    first = bench.call()
    assert first.calls_left == 3
    second, third = bench.call(), bench.call(arrived=77)
    choice = bench.call(arrived=77)  # of the third, and no further call
    assert [task.calls_left for task in (first, second, third, choice)] == [1] * 4
    bench.end(second, refused(QueueFull("full")))
    assert third.calls_left == 2, "it is to be made again"
    for task in (bench.call(), first, third):
        bench.end(task)
    assert bench.call().calls_left == 0
    stated = [bench.call(1, due_s=10, session="t") for _ in range(3)]
    assert [task.calls_left for task in stated] == [1, 1, 1], "each for itself"


def test_dl24_a_run_begins_with_its_first_call() -> None:
    bench = Bench()
    tells = {"due_s": 10.0, "tells": True}
    assert bench.call(**tells, arrived=1).job.run_began is None
    bench.clock.advance(4)
    assert bench.call(due_s=6.3, tells=True, arrived=bench.clock.now()).job.run_began == 1
    assert bench.call(arrived=6).job.run_began == 1, "and its deadline is theirs"
    now = bench.clock.now()
    assert bench.call(**tells, arrived=now).job.run_began == now, "another run of the conversation"
    assert bench.call(due_s=9.0, arrived=2, session="").job.run_began is None


def test_nobody_pushes_out_what_others_have_begun() -> None:
    """Not even by calls that are refused, which cost a key nothing."""
    bench = Bench(max_runs=10)
    mine = bench.call(3, due_s=60.0)
    for number in range(50):
        bench.call(1, due_s=60.0, key="busy", session=f"s{number}")
    assert len(bench.runs) == 10
    assert bench.call().deadline.at == mine.deadline.at
