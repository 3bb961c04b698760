"""Runs planned steps one by one or one ahead, and splits a step that fails.

With overlap, the engine launches a step before it reads the previous one. The device never waits::

    engine     launch 1 │ launch 2 │ read 1, apply │ launch 3 │ read 2, apply │ …
    device              ├─────── 1 ───────┼────── 2 ──────┼────── 3 ──────┼ …

A step's duration is its time on the device's clock, or its launch time if that is longer (WK-15).
The host's clock would not do: a step is read only after the next launch, so a long launch would
count for the step before it.

A failed step is retried in halves, until only the requests that make it fail end::

    a b c d e f g h    failed                  one step each, deadlines and aborts checked between
    ├─ a b c d         computed
    └─ e f g h         failed
       ├─ e f          failed
       │  ├─ e         failed: ends with an error
       │  └─ f         computed
       └─ g h          computed

A failed step leaves no lasting change: the retry writes its KV again, and a draw is a function of
seed and position. If memory ran out, ``out_of_memory`` decides what may fit.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from protocol import Code
from worker.core import Clock
from worker.engine.backend import Executed
from worker.errors import DeviceLost
from worker.log import engine_log
from worker.runner.base import OverlappingRunner, Runner, StepInFlight
from worker.runner.memory import is_out_of_memory
from worker.runner.out_of_memory import StepMemory
from worker.scheduler.end_reason import EndReason, failed
from worker.scheduler.plan import DeviceTime, Plan, Row
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler

_USE_SMOOTHING: Final = 1 / 256
"""Averages over a few seconds of steps, about one scrape interval of the metrics."""


class Bisection:
    """The groups of rows still to try after a failure. Used by the engine's thread."""

    def __init__(self) -> None:
        self._groups: list[frozenset[Request]] = []
        self._last_error = ""

    @property
    def is_on(self) -> bool:
        return bool(self._groups)

    def cut(self, plan: Plan) -> Plan:
        """The part of ``plan`` in the next group to try; all of it if no group is left."""
        while self._groups:
            group = self._groups[-1]
            rows = [row for row in plan.rows if row.request in group]
            if len(rows) == len(plan.rows):
                return plan
            if rows:
                decodes = sum(row.request in group for row in plan.rows[: plan.decodes])
                return Plan(rows, decodes, sum(row.count for row in rows))
            self._groups.pop()
        return plan

    def passed(self) -> None:
        """Note that the rows of the last ``cut`` were computed."""
        if self._groups:
            self._groups.pop()

    def failed(self, rows: Sequence[Row], error: Exception) -> Request | None:
        """Note that these rows failed. Returns the request to end once only one is left."""
        what = f"{type(error).__name__}: {error}"
        engine_log.error(
            "step of %d rows failed (%s)%s",
            len(rows),
            type(error).__name__,
            "; retrying it in halves" if len(rows) > 1 else "; its request ends with engine_error",
            exc_info=None if what == self._last_error else error,  # not for each half
        )
        self._last_error = what
        return self.halve(rows)

    def halve(self, rows: Sequence[Row]) -> Request | None:
        """Split these rows into halves to try. Returns the request once only one is left."""
        if self._groups:
            self._groups.pop()
        requests = list(dict.fromkeys(row.request for row in rows))
        if len(requests) == 1:
            return requests[0]
        middle = len(requests) // 2
        self._groups += [frozenset(requests[middle:]), frozenset(requests[:middle])]
        return None


class Executor:
    """Runs the scheduler's plans on the runner. Used by the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        memory: StepMemory,
        clock: Clock,
        *,
        overlap: bool,
    ) -> None:
        """``overlap`` takes effect with an ``OverlappingRunner`` only."""
        self._scheduler = scheduler
        self.runner = runner
        self.launcher = runner if overlap and isinstance(runner, OverlappingRunner) else None
        """The runner, if steps are launched one ahead; None if each step is computed at once."""
        self._memory = memory
        self._clock = clock
        self._bisection = Bisection()
        self._in_flight: StepInFlight | None = None
        """The step that was launched but not read yet."""
        self.stream_utilization = 0.0
        """Share of time for which the device computes steps, a moving average; 0 without a device
        clock (LB-7)."""
        self._launch_failed = False
        """Whether the next step is computed without overlap."""

    @property
    def in_flight(self) -> frozenset[Request]:
        """Requests with a row in the launched step."""
        return frozenset() if self._in_flight is None else self._in_flight.requests

    def run(self, plan: Plan | None) -> Executed | None:
        """Compute what fits of ``plan``, or launch it and read the step before; None if idle.

        Raises ``DeviceLost``, for which no request is to blame; none can continue here.
        """
        if plan is not None:
            plan = self._bisection.cut(plan)
        is_plain = self._launch_failed or self._bisection.is_on or self._memory.too_large
        if self.launcher is not None and not is_plain:
            return self._launch(self.launcher, plan)
        if plan is None:
            return None
        self._launch_failed = False
        return self._execute(plan)

    def discard(self) -> None:
        """Wait for the step in flight and drop its result."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        with suppress(Exception):  # any error: all jobs end here
            step.collect()
        for row in step.plan.rows:
            self._scheduler.discard(row)

    def _execute(self, plan: Plan) -> Executed:
        failed: dict[Request, EndReason | None] = {}
        plan = self._memory.fit(plan, failed)
        if not plan.rows:
            return Executed(failed=failed)
        started = self._clock()
        try:
            result = self.runner.execute(plan)
            if len(result.ids) != len(plan.rows):
                raise RuntimeError(f"{len(result.ids)} results for {len(plan.rows)} rows")
        except DeviceLost:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                return self._failed(plan.rows, error)
            # Keep only the text: the error's traceback keeps the step's tensors alive.
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            duration_s = self._clock() - started
            if result.device is not None:
                self._note_use(result.device)
            self._bisection.passed()
            self._memory.computed()
            failed |= self._memory.taken()
            return Executed(plan, result, duration_s, self._scheduler.advance, failed=failed)
        return self._without_memory(plan.rows, problem)

    def _without_memory(self, rows: Sequence[Row], problem: str) -> Executed:
        """Retry rows that did not fit in memory, whole or in parts."""
        tokens = sum(row.count for row in rows)
        if not self._memory.lacked(len(rows), tokens, problem):
            request = self._bisection.halve(rows)
            if request is not None and tokens == 1:
                self._memory.lacked_one_token(request, problem)
        return Executed(failed=dict.fromkeys(row.request for row in rows))

    def _launch(self, launcher: OverlappingRunner, plan: Plan | None) -> Executed | None:
        before, self._in_flight = self._in_flight, None
        ran = plan is not None or before is not None
        if plan is not None and self._memory.is_over_limit():
            self._launch_failed, plan = True, None
        if plan is not None:
            plan = self._memory.cut(plan)
            began = self._clock()
            try:
                launched = launcher.launch(plan)
            except DeviceLost:
                raise
            except Exception:
                engine_log.exception(
                    "step launch of %d rows failed; retrying without overlap", len(plan.rows)
                )
                self._launch_failed = True
            else:
                self._in_flight = StepInFlight(plan, launched, self._clock() - began)
                for row in plan.rows:
                    self._scheduler.launch(row)
        if before is not None:
            return self._collect(before)
        return Executed() if ran else None

    def _collect(self, step: StepInFlight) -> Executed:
        began = self._clock()
        try:
            result = step.collect()
        except DeviceLost:
            raise
        except Exception as error:
            # The next step was launched with this step's tokens as inputs, so both are undone.
            after, self._in_flight = self._in_flight, None
            rows = step.plan.rows + (after.plan.rows if after is not None else [])
            for row in reversed(rows):
                self._scheduler.undo_launch(row)
            return self._failed(rows, error)
        self._memory.computed()
        device = result.device
        if device is None:
            # The step's time on the host, with no part counted twice.
            duration_s = step.launch_s + self._clock() - began
        else:
            self._note_use(device)
            duration_s = max(device.busy_s, step.launch_s - device.waited_s)
        scheduler = self._scheduler
        return Executed(step.plan, result, duration_s, scheduler.confirm, scheduler.discard)

    def _note_use(self, device: DeviceTime) -> None:
        if (whole_s := device.busy_s + device.idle_s) > 0:
            excess = device.busy_s / whole_s - self.stream_utilization
            self.stream_utilization += excess * (_USE_SMOOTHING if self.stream_utilization else 1.0)

    def _failed(self, rows: Sequence[Row], error: Exception) -> Executed:
        """End the request if it failed alone in a step; otherwise retry the rows in halves."""
        guilty = self._bisection.failed(rows, error)
        what = f"the engine failed in a step ({type(error).__name__}); its log has the details"
        why = failed(Code.ENGINE_ERROR, what)
        requests = dict.fromkeys(row.request for row in rows)
        return Executed(failed={one: why if one is guilty else None for one in requests})
