"""Learns the number of calls of runs that do not state it, and the time between them. Calls form a
run if they have the same ``session_id`` or trace and state the same deadline: an agent passes its
user's deadline from call to call. When a run is over, its number of calls is learned by tenant and
by the agent's instructions. A call's share of the time then allows for the expected later calls and
for the agent's work between them. The expected number is the mean of the remaining calls, from the
shares of runs that ended after each number of calls (Kaplan and Meier 1958: a run that was cut
short had at least that many). Small samples are shrunk towards larger ones: an agent's towards its
tenant's, a tenant's towards all. Without data, no calls are expected.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from orchestrator.clock import Clock
from orchestrator.tasks.runs import SAME_DEADLINE_S, RunName, run_names
from orchestrator.tasks.task import Task

MAX_CALLS: Final = 128
"""Maximum number of calls that are counted in a run; after them no more are expected."""
MAX_WATCHED: Final = 16_384
MAX_KINDS: Final = 4096
HALF_LIFE: Final = 64
_LEANING: Final = 3.0
"""Weight of a wider kind's sample, in runs."""
_MIN_ALIVE: Final = 0.02
_FEWEST: Final = 0.1
_KEPT: Final = 0.5 ** (1 / HALF_LIFE)
_GRACE_S: Final = 1.0


class CallsToCome(NamedTuple):
    """Expected after a call: the number of further calls, and the total ms between them."""

    calls: float
    between_ms: float


NONE_TO_COME: Final = CallsToCome(0.0, 0.0)

Kind = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _Node:
    reached: list[float] = field(default_factory=lambda: [0.0] * (MAX_CALLS + 1))
    """Weight of the runs that had a call of each number."""
    ended: list[float] = field(default_factory=lambda: [0.0] * (MAX_CALLS + 1))
    """Weight of the runs that ended after it."""
    between_s: float = 0.0
    """Sum of the seconds between calls, over ``gaps`` gaps."""
    gaps: float = 0.0

    def add(self, calls: int, *, ended: bool) -> None:
        """Count a run of ``calls`` calls, or of at least as many if it has not ``ended``."""
        calls = min(calls, MAX_CALLS)
        self.reached = [_KEPT * weight for weight in self.reached]
        self.ended = [_KEPT * weight for weight in self.ended]
        for number in range(1, calls + 1):
            # A run that was cut short might have continued after its last call.
            self.reached[number] += ended or number < calls
        self.ended[calls] += ended

    def add_gap(self, seconds: float) -> None:
        self.between_s = _KEPT * self.between_s + seconds
        self.gaps = _KEPT * self.gaps + 1


class RunLengths:
    """Statistics of runs by kind. A kind is a chain of names, widest first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Kind, _Node] = OrderedDict()
        """Least recently used first."""

    def add(self, kinds: Sequence[Kind], calls: int, *, ended: bool) -> None:
        for kind in kinds:
            self._node(kind).add(calls, ended=ended)

    def add_gap(self, kinds: Sequence[Kind], seconds: float) -> None:
        """Count the time from the end of one call to the next."""
        for kind in kinds:
            self._node(kind).add_gap(seconds)

    def to_come(self, kinds: Sequence[Kind], made: int) -> CallsToCome:
        """Expected calls after call number ``made`` of a run of these kinds."""
        nodes = [self._nodes[kind] for kind in kinds if kind in self._nodes]
        if not nodes:
            return NONE_TO_COME
        calls, alive = 0.0, 1.0
        for number in range(min(made, MAX_CALLS), MAX_CALLS + 1):
            alive *= 1 - _ends_after(nodes, number)
            calls += alive
            if alive < _MIN_ALIVE:
                break
        if calls < _FEWEST:
            return NONE_TO_COME
        between_s = next((one.between_s / one.gaps for one in reversed(nodes) if one.gaps), 0.0)
        return CallsToCome(calls, 1000 * between_s * calls)

    def _node(self, kind: Kind) -> _Node:
        node = self._nodes.get(kind)
        if node is None:
            node = self._nodes[kind] = _Node()
            if len(self._nodes) > MAX_KINDS:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(kind)
        return node


def _ends_after(nodes: Sequence[_Node], number: int) -> float:
    """Share of runs with ``number`` calls that have no more: each node's, shrunk towards the wider
    node before it."""
    share = 1.0
    for node in nodes:
        reached, ended = node.reached[number], node.ended[number]
        share = (ended + _LEANING * share) / (reached + _LEANING)
    return share


@dataclass(eq=False, slots=True)
class _Watched:
    names: Sequence[RunName]
    due_at: float
    kinds: tuple[Kind, ...]
    calls: int = 0
    running: int = 0
    ended_at: float = math.inf
    """When its latest call ended; infinite if none has ended."""
    is_cut: bool = False
    """Whether its latest call failed: if the run ends now, that is why."""


class RunWatch:
    """Follows runs that state no number of calls and predicts later calls. For the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.lengths = RunLengths()
        self._clock = clock
        self._by_name: OrderedDict[RunName, _Watched] = OrderedDict()
        """Runs that may be live, least recently used first."""
        self._due: list[tuple[float, int, _Watched]] = []
        """Heap of runs by the time when they are certainly over."""
        self._order = count()

    def begin(self, task: Task) -> None:
        """Record a call whose prompt was read, and set its expected later calls. Ignores calls that
        state their number of later calls, whose model is told when to finish, that state no
        deadline, or that have neither session nor trace."""
        job = task.job
        if job.calls_left is not None or job.tell_time is not None or job.deadline.is_default:
            return
        names = run_names(job)
        if not names:
            return
        now = self._clock.now()
        while self._due and self._due[0][0] <= now:
            self._over(heappop(self._due)[2])
        run = self._run_of(task, names)
        if not run.running:  # a parallel call is not a further one
            run.calls += 1
            if run.ended_at < job.arrived:
                self.lengths.add_gap(run.kinds, job.arrived - run.ended_at)
        run.running += 1
        task.calls_left, task.between_calls_ms = self.lengths.to_come(run.kinds, run.calls)
        task.on_end.append(lambda ended: self._call_ended(run, ended))

    def _run_of(self, task: Task, names: Sequence[RunName]) -> _Watched:
        due_at = task.deadline.at
        for name in names:
            run = self._by_name.get(name)
            if run is not None and abs(run.due_at - due_at) <= SAME_DEADLINE_S:
                self._name(run, names)
                return run
            if run is not None:
                self._over(run)
        kind = task.job.key, task.job.tenant
        kinds: tuple[Kind, ...] = ((), kind, (*kind, task.prompt_kind.instructions))
        run = _Watched(names, due_at, kinds)
        self._name(run, names)
        heappush(self._due, (due_at + _GRACE_S, next(self._order), run))
        return run

    def _name(self, run: _Watched, names: Sequence[RunName]) -> None:
        run.names = list(dict.fromkeys((*run.names, *names)))
        for name in run.names:
            self._by_name[name] = run
            self._by_name.move_to_end(name)
        while len(self._by_name) > MAX_WATCHED:
            self._by_name.popitem(last=False)

    def _call_ended(self, run: _Watched, task: Task) -> None:
        run.running -= 1
        run.is_cut = task.ending is None or task.ending.error is not None
        if not run.running:
            run.ended_at = self._clock.now()

    def _over(self, run: _Watched) -> None:
        if not run.calls:
            return
        self.lengths.add(run.kinds, run.calls, ended=not (run.is_cut or run.running))
        run.calls = 0
        for name in run.names:
            if self._by_name.get(name) is run:
                del self._by_name[name]
