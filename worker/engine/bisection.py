"""A step that fails is retried in halves, until only the requests that make it fail end.

::

    a b c d e f g h    failed                  one step each, deadlines and aborts checked between
    ├─ a b c d         computed
    └─ e f g h         failed
       ├─ e f          failed
       │  ├─ e         failed: ends with an error
       │  └─ f         computed
       └─ g h          computed

A step that failed has changed nothing that counts: its KV is written anew, and a draw is a function
of seed and position. Running out of memory is handled before, by ``runner.out_of_memory``.
"""

from collections.abc import Sequence

from protocol import Code, FinishReason
from worker.log import engine_log
from worker.scheduler.end_reason import EndReason
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import Request


class Bisection:
    """The groups that are still to be tried. Used by the engine's thread."""

    def __init__(self) -> None:
        self._groups: list[frozenset[Request]] = []
        self._last_error = ""

    @property
    def is_on(self) -> bool:
        return bool(self._groups)

    def cut(self, plan: Plan) -> Plan:
        """The part of ``plan`` in the next group to be tried; all of it if no group is left."""
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
        """Note that the rows that ``cut`` gave last were computed."""
        if self._groups:
            self._groups.pop()

    def failed(self, rows: Sequence[Row], error: Exception) -> Request | None:
        """Note that these rows failed; returns the request to end for it, once only one is left."""
        self._log(len(rows), error)
        if self._groups:
            self._groups.pop()
        requests = list(dict.fromkeys(row.request for row in rows))
        if len(requests) == 1:
            return requests[0]
        middle = len(requests) // 2
        self._groups += [frozenset(requests[middle:]), frozenset(requests[:middle])]
        return None

    def _log(self, rows: int, error: Exception) -> None:
        """Log the failure, with a traceback only the first time, not for each half."""
        what = f"{type(error).__name__}: {error}"
        engine_log.error(
            "step of %d rows failed (%s)%s",
            rows,
            type(error).__name__,
            "; retrying it in halves" if rows > 1 else "; its request ends with engine_error",
            exc_info=None if what == self._last_error else error,
        )
        self._last_error = what


def step_failed(error: Exception) -> EndReason:
    return EndReason(
        FinishReason.ERROR,
        Code.ENGINE_ERROR,
        f"the engine failed in a step ({type(error).__name__}); its log has the details",
    )
