"""Runs: consecutive calls under one deadline, as an agent makes them.

::

    call 1  X-Deadline: T   calls_left: 3    ─▶ its share: a quarter of the remaining time
    call 2  (nothing stated)                 ─▶ T, 2 later calls: a third
    call 3  (nothing stated)                 ─▶ T, 1 later call: half
    call 4  (nothing stated)                 ─▶ T, no later call: all of the remaining time

Parallel calls that state nothing are one step of the run: if calls 2 and 3 are parallel, each has 1
later call.

The calls of a run have the same ``session_id``, or the trace of the same ``traceparent``. A run
begins with a call that states its number of later calls, or with a deadline that the model is told:
other calls are not counted and inherit no deadline. A call that ended well is done; a failed call
may be repeated. If a call states a deadline or a number, later calls use it.

A call is ranked by an equal share of the run's slack: the remaining time minus the usual work of
all calls (Kao and Garcia-Molina, 1993: *Deadline assignment in a distributed soft real-time
system*; ``Forecaster``). Each plan recomputes it. A ``fit`` answer and the worker's own queue use
an equal share of the time. A call ends at the run's deadline.

Orchestrators with a shared state exchange news of their runs' calls (``on_news``, ``hear``).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from orchestrator.clock import Clock
from orchestrator.tasks.deadline import RUN, Deadline
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task

MAX_RUNS = 16_384
MAX_CALLS_LEFT = 1000
ANOTHER_RUN = 0.1
"""A deadline that is later by more than this share of the remaining time belongs to another run. A
smaller difference is network delay of the same deadline, stated as remaining time. A user's next
run is later by all the time since the last one began."""
SAME_DEADLINE_S = 0.02
"""Seconds by which the deadlines of a run's calls may differ: some clients state the remaining
time. Calls of different runs that are this close and have equally long deadlines are rare."""


class RunName(NamedTuple):
    """Name of a run, unique per key and tenant."""

    key: str
    tenant: str
    session_id: str
    trace_id: str


@dataclass(slots=True)
class _Run:
    deadline: Deadline
    calls: int | None
    """Number of calls that have not ended well yet, later ones included; None if no call stated it:
    then only the run's start is known."""
    began: float
    """When its first call arrived, in seconds of the clock."""
    counted: float = -1.0
    """Arrival time of the last counted call: its other choices are not further calls."""
    running: list[Task] = field(default_factory=list)

    def share(self) -> None:
        """Set the later calls of running calls. Parallel calls are one step of the run: each has
        the later calls without all of them (a DAG's longest path, not its number of calls)."""
        if self.calls is None or not any(task.job.shares_calls for task in self.running):
            return
        at_once = len({task.job.arrived for task in self.running})  # choices come together
        to_come = max(0, self.calls - at_once)
        for task in self.running:
            task.calls_left = min(task.job.calls_left or 0, to_come)


class RunNews(msgspec.Struct, frozen=True, array_like=True):
    """A change of a run at one orchestrator."""

    names: tuple[RunName, ...]
    calls: int | None = None
    """Number of calls that have not ended well yet, as stated by a call; None if a call ended
    well."""
    left_s: float = 0.0
    """Seconds until the run's deadline when the news was sent."""
    unix_ms: int = 0
    """Deadline of the run on the wall clock, in ms since 1970, for logs."""


class Runs:
    """The runs with later calls. A run is removed after its deadline."""

    def __init__(self, clock: Clock, max_runs: int = MAX_RUNS) -> None:
        self.on_news: Callable[[RunNews], None] = lambda news: None
        """Called with the news that other orchestrators need."""
        self._clock = clock
        self._max_runs = max_runs
        self._by_key = defaultdict[str, OrderedDict[RunName, _Run]](OrderedDict)
        """Least recently used first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def join(self, job: Job) -> Job:
        """``job`` with its run's number of later calls, and a deadline if it has none. The caller
        must ``follow`` its task. Like everything here, it runs on the event loop."""
        names, stated = run_names(job), job.deadline.unbounded or job.deadline
        calls = None if job.calls_left is None else 1 + job.calls_left
        run = self._find(names)
        if run is None:
            if names and (job.calls_left or (job.tell_time and not job.deadline.is_default)):
                run = _Run(stated, calls, job.arrived)
                self._remember(names, run)
                self._tell(names, run)
            return job
        if calls is not None:
            run.calls = calls
        if not job.deadline.is_default:
            later_s, left_s = stated.at - run.deadline.at, stated.at - job.arrived
            if run.calls is None and later_s > max(SAME_DEADLINE_S, ANOTHER_RUN * left_s):
                run.began = job.arrived  # another run of the same conversation
            run.deadline = stated
        self._remember(names, run)
        if calls is not None or not job.deadline.is_default:
            self._tell(names, run)
        deadline = job.deadline
        if deadline.is_default:
            bound, deadline = deadline, replace(run.deadline, source=RUN)
            if bound.unbounded is not None and bound.at < deadline.at:
                deadline = replace(bound, is_default=deadline.is_default, unbounded=deadline)
        job = replace(job, deadline=deadline, run_began=run.began)
        if run.calls is None:
            return job
        return replace(job, calls_left=max(0, run.calls - 1), shares_calls=calls is None)

    def follow(self, task: Task) -> None:
        """Count the task's call after it has ended well."""
        names = run_names(task.job)
        if task.job.calls_left is None or not names:
            return
        task.on_end.append(self._ended)
        if (run := self._find(names)) is not None:
            run.running.append(task)
            run.share()

    def _ended(self, task: Task) -> None:
        names = run_names(task.job)
        run = self._find(names)
        assert task.ending is not None
        if run is not None and task in run.running:
            run.running.remove(task)
            run.share()
        if run is None or task.ending.error is not None or run.counted == task.job.arrived:
            return
        run.counted = task.job.arrived
        self._call_ended(names, run)
        self.on_news(RunNews(tuple(names)))

    def _call_ended(self, names: Sequence[RunName], run: _Run) -> None:
        if run.calls is None:
            return
        run.calls -= 1
        run.share()
        if run.calls < 1:
            for name in names:
                self._forget(name)

    # ── together with other orchestrators ────────────────────────────────────────────────────

    def _tell(self, names: Sequence[RunName], run: _Run) -> None:
        if run.calls is None:  # others start its clock at its first call there
            return
        deadline = run.deadline
        left_s = deadline.at - self._clock.now()
        self.on_news(RunNews(tuple(names), run.calls, left_s, deadline.unix_ms))

    def hear(self, news: RunNews) -> None:
        run = self._find(news.names)
        if news.calls is not None:
            deadline = Deadline(self._clock.now() + news.left_s, news.unix_ms)
            if run is None:
                run = _Run(deadline, news.calls, self._clock.now())
            run.calls, run.deadline = news.calls, deadline
            self._remember(news.names, run)
        elif run is not None:
            self._call_ended(news.names, run)

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _find(self, names: Sequence[RunName]) -> _Run | None:
        for name in names:
            run = self._by_key[name.key].get(name)
            if run is not None:
                if run.deadline.at > self._clock.now():
                    return run
                self._forget(name)
        return None

    def _remember(self, names: Sequence[RunName], run: _Run) -> None:
        for name in names:
            own = self._by_key[name.key]
            self._count += name not in own
            own[name] = run
            own.move_to_end(name)
        while self._count > self._max_runs:
            # The key with the most runs loses one, so that no key displaces others' runs.
            most = max(self._by_key.values(), key=len)
            self._forget(next(iter(most)))

    def _forget(self, name: RunName) -> None:
        if self._by_key[name.key].pop(name, None) is not None:
            self._count -= 1


def run_names(job: Job) -> list[RunName]:
    names = []
    if job.session_id:
        names.append(RunName(job.key, job.tenant, job.session_id, ""))
    if job.trace is not None:
        names.append(RunName(job.key, job.tenant, "", job.trace.trace_id))
    return names
