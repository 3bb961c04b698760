"""Keeps steps within available memory (WK-4).

A step that runs out of memory is retried once after dropping caches, then like any failed step: in
halves (``executor``), with fewer prompt tokens each time. A request fails only if not even one
token fits, and another instance may have room for it. If several requests in a row fail this way
and nothing else is computed, the device has no memory left: it leaked, or another process took it.
"""

from typing import Final

from protocol import Code, FinishReason
from worker.errors import DeviceLost, MemoryLimitExceeded
from worker.log import engine_log
from worker.memory import MemoryGuard
from worker.scheduler.end_reason import EndReason
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import Request

_CHECK_EVERY_STEPS: Final = 32
_GROW_AFTER_STEPS: Final = 64
"""Successful steps before twice as many tokens are tried."""
_FULL_AFTER: Final = 3
"""Requests in a row without memory for one token before the device counts as lost."""
_TRIED_IN_VAIN: Final = 8
"""Maximum number of requests to try if none of them gets memory: each try takes time."""


class StepMemory:
    """Tracks how much fits in a step and which requests never fit. For the engine's thread."""

    def __init__(self, guard: MemoryGuard | None = None) -> None:
        self._guard = guard
        self._steps = 0
        self._most_tokens: int | None = None
        """Token limit of a step after a larger step did not fit."""
        self._clean_steps = 0
        self._is_retried = False
        """Whether the last step that did not fit was already retried as a whole."""
        self._excess: str | None = None
        """Message that the hard limit is exceeded; kept until a request fails for it."""
        self.too_large: dict[Request, EndReason] = {}
        """Requests for which not even one token fit; kept until another step succeeds or nothing is
        left to try."""
        self._without_room = 0
        """Number of requests in a row without memory for one token."""

    def is_over_limit(self) -> bool:
        """Whether the next ``fit`` fails a request for memory; measured every few calls."""
        self._steps += 1
        if self._guard is not None and self._steps % _CHECK_EVERY_STEPS == 0:
            try:
                self._guard.check()
            except MemoryLimitExceeded as error:
                self._excess = str(error)
        return self._excess is not None

    def fit(self, plan: Plan, failed: dict[Request, EndReason | None]) -> Plan:
        """The part of ``plan`` that may fit. Adds requests that must end to ``failed``. Raises
        ``DeviceLost`` if several requests in a row had no memory for a single token."""
        if self._excess is not None or self.is_over_limit():
            excess, self._excess = self._excess or "", None
            engine_log.error("%s; failing the longest of %d requests", excess, len(plan.rows))
            longest = max(plan.rows, key=lambda row: len(row.request.tokens)).request
            failed[longest] = _no_memory(excess)
        if gone := failed | self.too_large:
            plan = _plan_of([row for row in plan.rows if row.request not in gone])
            if not plan.rows:
                self._count_too_large()
                failed |= self.taken()
        return self.cut(plan)

    def cut(self, plan: Plan) -> Plan:
        """``plan`` with at most as many prompt tokens as are known to fit."""
        if self._most_tokens is None or plan.tokens <= max(plan.decodes, self._most_tokens):
            return plan
        left = max(1, self._most_tokens - plan.decodes)
        rows = plan.rows[: plan.decodes]
        for row in plan.rows[plan.decodes :]:
            if not left:
                break
            rows.append(row if row.count <= left else Row(row.request, row.start, left, False))
            left -= rows[-1].count
        return _plan_of(rows)

    def computed(self) -> None:
        """Note that a step had enough memory."""
        self._without_room = 0
        self._is_retried = False
        if self._most_tokens is not None:
            self._clean_steps += 1
            if self._clean_steps >= _GROW_AFTER_STEPS:
                self._clean_steps = 0
                self._most_tokens *= 2

    def lacked(self, rows: int, tokens: int, problem: str) -> bool:
        """Note that a step did not fit. Returns whether to retry it unchanged."""
        engine_log.warning(
            "step of %d rows, %d tokens ran out of memory (%s); dropping caches, retrying in parts",
            rows,
            tokens,
            problem,
        )
        if self._guard is not None:
            self._guard.meter.drop_caches()
        self._clean_steps = 0
        if not self._is_retried:  # there may be room after dropping caches
            self._is_retried = True
            return True
        self._most_tokens = max(1, tokens // 2)
        return False

    def lacked_one_token(self, request: Request, problem: str) -> None:
        """Note that not even one token of a request fits. Raises ``DeviceLost``; see ``fit``."""
        engine_log.error("not even one token of a request fits into memory")
        self.too_large[request] = _no_memory(problem)
        if len(self.too_large) >= _TRIED_IN_VAIN:
            self._count_too_large()

    def taken(self) -> dict[Request, EndReason | None]:
        """The requests that are too large and have not ended yet. The caller must end them now."""
        taken, self.too_large = self.too_large, {}
        return {one: why for one, why in taken.items() if one.slot >= 0 or one.paused}

    def _count_too_large(self) -> None:
        self._without_room += len(self.too_large)
        if self._without_room >= _FULL_AFTER:
            first = next(iter(self.too_large.values()))
            raise DeviceLost(
                f"{self._without_room} requests in a row found no memory for one token"
                f" ({first.message})"
            )


def _plan_of(rows: list[Row]) -> Plan:
    """Plan of ``rows``, decodes first; a prompt's last token alone counts as a decode."""
    rows = sorted(rows, key=lambda row: not _decodes(row))
    return Plan(rows, sum(map(_decodes, rows)), sum(row.count for row in rows))


def _decodes(row: Row) -> bool:
    return row.count == 1 and row.samples


def _no_memory(problem: str) -> EndReason:
    return EndReason(
        FinishReason.ERROR,
        Code.NO_CAPACITY,
        f"the worker ran out of memory ({problem}); try again later, with a shorter prompt, or"
        " elsewhere",
    )
