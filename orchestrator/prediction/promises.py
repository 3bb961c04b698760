"""Deadlines that the service has named as feasible, and what keeping them takes (DL-7, DL-16).

A refusal as infeasible names the earliest deadline that is not. A share of the capacity is reserved
for a while, for a client that comes back with that deadline.
"""

from collections import OrderedDict
from typing import NamedTuple

from orchestrator.clock import Clock
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.tasks.task import Task
from worker.protocol import Outcome

PROMISED_SHARE = 0.5
"""Share of the capacity that promises are made of."""
CLAIM_S = 2.0
"""Seconds after which a promise that nobody came back for is void."""
_MAX_PROMISES = 4096
_SLOP_MS = 16
"""Most ms by which a deadline that is stated as a time span comes out later."""
_LOST = (Outcome.MISSED, Outcome.PARTIAL, Outcome.REFUSED)


class _Promise(NamedTuple):
    work_ms: float
    made_at: float


class Promises:
    """Open promises, and the tasks that came back for theirs."""

    def __init__(self, forecaster: Forecaster, clock: Clock) -> None:
        self._forecaster = forecaster
        self._clock = clock
        self._open: OrderedDict[int, _Promise] = OrderedDict()
        """Open promises, by the deadline that was named, in epoch milliseconds."""
        self._claimed: dict[str, Task] = {}

    def wait_ms(self) -> float:
        """Ms until one more promise can be kept, after all earlier ones.

        Promises get a share of the capacity, so that they can be kept whatever else comes.
        """
        now = self._clock.now()
        while self._open:
            unix_ms, promise = next(iter(self._open.items()))
            if now < promise.made_at + CLAIM_S:
                break
            del self._open[unix_ms]
        work_ms = sum(promise.work_ms for promise in self._open.values())
        work_ms += sum(task.work_ms for task in self._claimed.values())
        ready = len(self._forecaster.capacity_of("").models)
        return work_ms / (PROMISED_SHARE * max(1, ready))

    def make(self, deadline_unix_ms: int, task: Task) -> None:
        """Note that this deadline is named to the client of ``task`` as feasible."""
        self._open[deadline_unix_ms] = _Promise(task.work_ms, self._clock.now())
        while len(self._open) > _MAX_PROMISES:
            self._open.popitem(last=False)

    def claim(self, task: Task) -> None:
        """Mark ``task`` as promised if its deadline was named; a promise is good for one task."""
        stated = task.deadline.unix_ms
        for unix_ms in range(stated, stated - _SLOP_MS, -1):
            if self._open.pop(unix_ms, None) is not None:
                task.is_promised = True
                self._claimed[task.id] = task
                task.on_end.append(self._ended)
                return

    def _ended(self, task: Task) -> None:
        self._claimed.pop(task.id, None)
        assert task.ending is not None
        outcome = task.ending.outcome
        # A task that never got into the queue came too late, or found it full: no safety cures
        # that.
        if task.marks.queued and (outcome is Outcome.MET or outcome in _LOST):
            self._forecaster.promise_ended(task.model, kept=outcome is Outcome.MET)
