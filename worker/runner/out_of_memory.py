"""Computes what fits of steps that exceed memory, and fails the rest alone (WK-4).

::

    step of a, b, c and a chunk of d's prompt     out of memory, and again without caches
      ├─ a, b, c                                  computed
      └─ the chunk of d                           out of memory
           └─ the first half of it                computed; the rest comes in later steps

Only a request of which not even one token can be computed fails, and another instance may have room
for it. Where that befalls one after the other, and nothing else is computed, the device has no room
left for anybody: memory has leaked, or another process has taken it.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from protocol import Code, FinishReason, PromptLogprobs, TokenLogprob
from worker.errors import DeviceLost, MemoryLimitExceeded
from worker.log import engine_log
from worker.memory import MemoryGuard
from worker.runner.base import Runner
from worker.runner.memory import is_out_of_memory
from worker.scheduler.end_reason import EndReason
from worker.scheduler.plan import Plan, Row, StepResult
from worker.scheduler.request import Request

_CHECK_EVERY_STEPS: Final = 32
_GROW_AFTER_STEPS: Final = 64
"""Steps without trouble after which twice as many tokens are tried."""
_FULL_AFTER: Final = 3
"""How many requests in a row find no memory for one token until the device counts as lost."""
_TRIED_IN_VAIN: Final = 8
"""How many of a step's requests are tried where not one of them finds any: each try takes time."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of a step: ``result`` is that of ``plan``, perhaps less than was asked for.

    ``failed`` requests are in no row of it; each says why.
    """

    plan: Plan
    result: StepResult
    failed: list[tuple[Request, EndReason]]


class _Done(NamedTuple):
    """A row's computed results."""

    row: Row
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    read: list[PromptLogprobs]
    pooled: Any
    is_finite: bool


class StepMemory:
    """Executes plans within available memory. Used by the engine's thread."""

    def __init__(self, guard: MemoryGuard | None = None) -> None:
        self._guard = guard
        self._steps = 0
        self._most_tokens: int | None = None
        """Tokens that a step is cut to since a larger one did not fit."""
        self._clean_steps = 0
        self._excess: str | None = None
        """Message that the hard limit is exceeded, until a request has been failed for it."""
        self._without_room = 0
        """How many requests in a row found no memory for one token."""

    def is_over_limit(self) -> bool:
        """Whether the next ``execute`` fails a request for memory; measured every few calls."""
        self._steps += 1
        if self._guard is not None and self._steps % _CHECK_EVERY_STEPS == 0:
            try:
                self._guard.check()
            except MemoryLimitExceeded as error:
                self._excess = str(error)
        return self._excess is not None

    def cut(self, plan: Plan) -> Plan:
        """The plan with no more prompt tokens than are known to fit."""
        if self._most_tokens is None or plan.tokens <= max(plan.decodes, self._most_tokens):
            return plan
        left = max(1, self._most_tokens - plan.decodes)
        rows = plan.rows[: plan.decodes]
        for row in plan.rows[plan.decodes :]:
            if not left:
                break
            rows.append(row if row.count <= left else _head(row, left))
            left -= rows[-1].count
        return _plan_of(rows)

    def computed(self) -> None:
        """Note that there was memory for a step that was not computed by ``execute``."""
        self._without_room = 0

    def execute(self, runner: Runner, plan: Plan) -> StepOutcome:
        """Compute what fits. Raises whatever ``runner`` does that is not about memory, and
        ``DeviceLost`` where requests one after the other find no memory for a single token."""
        failed: list[tuple[Request, EndReason]] = []
        if self._excess is not None or self.is_over_limit():
            plan = self._without_longest(plan, failed)
        plan = self.cut(plan)
        if not plan.rows:
            return StepOutcome(plan, StepResult([]), failed)
        problem = _try(runner, plan)
        if isinstance(problem, StepResult):
            self._without_room = 0
            self._grow()
            return StepOutcome(plan, problem, failed)
        self._clean_steps = 0
        engine_log.warning(
            "step of %d rows, %d tokens ran out of memory (%s); dropping caches, retrying in parts",
            len(plan.rows),
            plan.tokens,
            problem,
        )
        done: list[_Done] = []
        alone: list[str] = []
        """What was said for each request of which not even one token fits."""
        # The whole plan is tried once more: there may be room now.
        waiting, fits = [plan], 1
        self._drop_caches()
        while waiting:
            part = waiting.pop()
            result = _try(runner, part)
            if isinstance(result, StepResult):
                logprobs = result.logprobs or [None] * len(part.rows)
                read = [(result.prompts or {}).get(i, []) for i in range(len(part.rows))]
                pooled = [(result.pooled or {}).get(i) for i in range(len(part.rows))]
                finite = [i not in result.not_finite for i in range(len(part.rows))]
                done += map(_Done, part.rows, result.ids, logprobs, read, pooled, finite)
                fits = max(fits, part.tokens)
                continue
            self._drop_caches()
            smaller = _split(part)
            waiting += smaller
            if not smaller:
                alone.append(result)
                failed.append((part.rows[0].request, _no_memory(result)))
                engine_log.error("request failed: not even one token of it fits into memory")
                if not done and len(alone) >= _TRIED_IN_VAIN:
                    break
        self._without_room = 0 if done else self._without_room + len(alone)
        if self._without_room >= _FULL_AFTER:
            raise DeviceLost(
                f"{self._without_room} requests in a row found no memory for one token ({alone[0]})"
            )
        self._most_tokens = fits
        return _joined(done, failed)

    def _without_longest(self, plan: Plan, failed: list[tuple[Request, EndReason]]) -> Plan:
        """Fail the longest request, since the worker exceeds its hard limit without caches too."""
        excess, self._excess = self._excess, None
        engine_log.error("%s; failing the longest of %d requests", excess, len(plan.rows))
        longest = max(plan.rows, key=lambda row: len(row.request.tokens))
        failed.append((longest.request, _no_memory(excess or "")))
        return _plan_of([row for row in plan.rows if row is not longest])

    def _grow(self) -> None:
        if self._most_tokens is None:
            return
        self._clean_steps += 1
        if self._clean_steps >= _GROW_AFTER_STEPS:
            self._clean_steps = 0
            self._most_tokens *= 2

    def _drop_caches(self) -> None:
        if self._guard is not None:
            self._guard.meter.drop_caches()


def _try(runner: Runner, plan: Plan) -> StepResult | str:
    """The result, or the message of the error when memory ran out.

    Not the error itself: its traceback keeps the tensors of the failed step alive.
    """
    try:
        result = runner.execute(plan)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if len(result.ids) != len(plan.rows):
        raise RuntimeError(f"{len(result.ids)} results for {len(plan.rows)} rows")
    return result


def _split(plan: Plan) -> list[Plan]:
    """Two smaller plans, the second to be tried first; one of half a chunk; or none at all."""
    rows = plan.rows
    if len(rows) == 1:
        count = rows[0].count // 2
        return [_plan_of([_head(rows[0], count)])] if count else []
    largest = max(range(len(rows)), key=lambda i: rows[i].count)
    if rows[largest].count > 1:
        return [_plan_of([rows[largest]]), _plan_of(rows[:largest] + rows[largest + 1 :])]
    middle = len(rows) // 2
    return [_plan_of(rows[middle:]), _plan_of(rows[:middle])]


def _head(row: Row, count: int) -> Row:
    return Row(row.request, row.start, count, False)


def _plan_of(rows: list[Row]) -> Plan:
    """Plan of ``rows``, decodes first; a prompt's last token alone counts as a decode."""
    rows = sorted(rows, key=lambda row: not _decodes(row))
    decodes = sum(map(_decodes, rows))
    return Plan(rows, decodes, sum(row.count for row in rows))


def _decodes(row: Row) -> bool:
    return row.count == 1 and row.samples


def _joined(done: list[_Done], failed: list[tuple[Request, EndReason]]) -> StepOutcome:
    plan = _plan_of([one.row for one in done])
    by_row = {id(one.row): one for one in done}
    results = [by_row[id(row)] for row in plan.rows]
    logprobs = [one.logprobs for one in results]
    result = StepResult(
        [one.ids for one in results],
        None if all(x is None for x in logprobs) else logprobs,
        {i: one.read for i, one in enumerate(results) if one.read} or None,
        {i: one.pooled for i, one in enumerate(results) if one.pooled is not None},
        [i for i, one in enumerate(results) if not one.is_finite],
    )
    return StepOutcome(plan, result, failed)


def _no_memory(problem: str) -> EndReason:
    return EndReason(
        FinishReason.ERROR,
        Code.NO_CAPACITY,
        f"the worker ran out of memory ({problem}); try again later, with a shorter prompt, or"
        " elsewhere",
    )
