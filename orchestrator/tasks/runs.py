"""Runs: several calls, one after the other, under one deadline, as an agent makes them.

::

    call 1  X-Deadline: T   calls_left: 3    ─▶ a quarter of what is left is this call's share
    call 2  (nothing said)                   ─▶ T, 2 to come: a third
    call 3  (nothing said)                   ─▶ T, 1 to come: half
    call 4  (nothing said)                   ─▶ T, none to come: all that is left

Calls that go out side by side, and say nothing, are one step of the run: with calls 2 and 3 at once
each has 1 to come.

The calls of a run have the same ``session_id``, or the trace of the same ``traceparent``. Only a
call that says how many are to come makes a run, or one with a deadline of which the model is told:
nobody else's calls are counted, or inherit a deadline. A call that ended well is done; one that
failed may be made again. A call that states a deadline or a number itself is taken at its word, and
later ones go by that.

A call is ranked by an equal share of the run's slack, which is what the usual work of all its calls
leaves of the time (Kao and Garcia-Molina, 1993: *Deadline assignment in a distributed soft
real-time system*; ``Forecaster``), computed again whenever it is planned. A ``fit`` answer and the
worker's own queue go by an equal share of the time. The deadline that ends a call is the run's.

Orchestrators that share a state tell each other of their runs' calls (``on_news``, ``hear``).
"""

from collections import OrderedDict
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
"""Share of what is left by which a later deadline is another run's. By less it is the same one,
stated as what is left of it and delayed on its way; a user's next run is later by all the time that
has passed since the last one began."""
SAME_DEADLINE_S = 0.02
"""Seconds by which the deadlines of a run's calls may differ: some clients state what is left.
Calls that follow each other more closely, each with as long a deadline, are rare."""


class RunName(NamedTuple):
    """Name of a run, which is its key's and tenant's own."""

    key: str
    tenant: str
    session_id: str
    trace_id: str


@dataclass(slots=True)
class _Run:
    deadline: Deadline
    calls: int | None
    """Number of calls that have not ended well yet, those to come included; None where nobody has
    said: the run is known for its beginning alone."""
    began: float
    """When its first call came."""
    counted: float = -1.0
    """When the call came that was counted last: its other choices are not further calls."""
    running: list[Task] = field(default_factory=list)
    """The run's calls that have not ended."""

    def share(self) -> None:
        """Calls that run side by side are one step of the run: what is to come after each of them
        is what is left without all of them (a DAG's longest path, not its number of calls)."""
        if self.calls is None or not any(task.job.shares_calls for task in self.running):
            return
        at_once = len({task.job.arrived for task in self.running})  # choices come together
        to_come = max(0, self.calls - at_once)
        for task in self.running:
            task.calls_left = min(task.job.calls_left or 0, to_come)


class RunNews(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a run at one orchestrator."""

    names: tuple[RunName, ...]
    calls: int | None = None
    """Number of calls that have not ended well yet, as a call has stated it; None where one has
    ended well."""
    left_s: float = 0.0
    """Seconds until the run's deadline, when this was sent."""
    unix_ms: int = 0
    """Deadline of the run on the wall clock, in ms since 1970, for logs."""


class Runs:
    """The runs that have calls to come. A run that is past its deadline is forgotten."""

    def __init__(self, clock: Clock, max_runs: int = MAX_RUNS) -> None:
        self.on_news: Callable[[RunNews], None] = lambda news: None
        """Called with what others have to know of the runs here."""
        self._clock = clock
        self._max_runs = max_runs
        self._by_key: dict[str, OrderedDict[RunName, _Run]] = {}
        """Runs of each key, by each of their names, the least recently used first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def join(self, job: Job) -> Job:
        """``job`` with its run's number of later calls, and a deadline if it has none. The caller
        must ``follow`` its task. Runs on the event loop, as everything here."""
        names = run_names(job)
        run = self._find(names)
        if run is None:
            if names and (job.calls_left or (job.tell_time and not job.deadline.is_default)):
                stated = job.deadline.unbounded or job.deadline
                calls = None if job.calls_left is None else 1 + job.calls_left
                run = _Run(stated, calls, job.arrived)
                self._remember(names, run)
                self._tell(names, run)
            return job
        if job.calls_left is not None:
            run.calls = 1 + job.calls_left
        if not job.deadline.is_default:
            stated = job.deadline.unbounded or job.deadline
            later_s, left_s = stated.at - run.deadline.at, stated.at - job.arrived
            if run.calls is None and later_s > max(SAME_DEADLINE_S, ANOTHER_RUN * left_s):
                run.began = job.arrived  # another run of the same conversation
            run.deadline = stated
        self._remember(names, run)
        if job.calls_left is not None or not job.deadline.is_default:
            self._tell(names, run)
        deadline = job.deadline
        if deadline.is_default:
            bound, deadline = deadline, replace(run.deadline, source=RUN)
            if bound.unbounded is not None and bound.at < deadline.at:
                deadline = replace(bound, is_default=deadline.is_default, unbounded=deadline)
        job = replace(job, deadline=deadline, run_began=run.began)
        if run.calls is None:
            return job
        states_none = job.calls_left is None
        return replace(job, calls_left=max(0, run.calls - 1), shares_calls=states_none)

    def follow(self, task: Task) -> None:
        """Count the task's call once it has ended well."""
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
        if run.calls is None:  # others begin to count its time when they hear its first call
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
            run = self._of_key(name).get(name)
            if run is not None:
                if run.deadline.at > self._clock.now():
                    return run
                self._forget(name)
        return None

    def _remember(self, names: Sequence[RunName], run: _Run) -> None:
        for name in names:
            own = self._by_key.setdefault(name.key, OrderedDict())
            self._count += name not in own
            own[name] = run
            own.move_to_end(name)
        while self._count > self._max_runs:
            # The key with most runs loses one: no key displaces others' runs by making more.
            most = max(self._by_key.values(), key=len)
            self._forget(next(iter(most)))

    def _of_key(self, name: RunName) -> OrderedDict[RunName, _Run]:
        return self._by_key.get(name.key) or OrderedDict()

    def _forget(self, name: RunName) -> None:
        own = self._of_key(name)
        if own.pop(name, None) is not None:
            self._count -= 1
            if not own:
                del self._by_key[name.key]


def run_names(job: Job) -> list[RunName]:
    names = []
    if job.session_id:
        names.append(RunName(job.key, job.tenant, job.session_id, ""))
    if job.trace is not None:
        names.append(RunName(job.key, job.tenant, "", job.trace.trace_id))
    return names
