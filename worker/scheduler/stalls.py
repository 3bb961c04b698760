"""Decides how many prompt tokens go with decodes: a prompt pays for the stall that it causes.

Each prompt token in a step delays every row that decodes in it. A row can spare what its deadline
leaves beyond the tokens that it will probably still make, in steps without prompts. What every row
can spare goes at full speed, and so does a short prompt that would wait for longer than all rows
together wait for it. The rest goes at a *pace*, so many seconds a step: the largest at which each
row still ends in time, or what a prompt needs for its own deadline where that is more. It is saved
up until it makes a chunk worth its fixed cost (``StepTime.chunk_s``)::

    a row bears     (time left / SURE − tokens left · plain step) / tokens left
    a prompt needs  plain step · u / (1 − u),    u = SURE · work / time left

``work`` is the prompt's own and that of the prompts before it. Where both cannot be had, it is the
pace at which the chances of rows and prompts add up to most. A row counts as often as rows like it
come and go while the prompts are computed: a prompt of seconds delays many more than those that
decode now. The chance to be in time is 1 with ``SURE`` times what is needed left, and 0 with
``LOST`` times, as where the orchestrator ranks.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from worker.scheduler.config import SchedulerConfig
from worker.scheduler.order import expected_left, prompt_due
from worker.scheduler.plan import Row
from worker.scheduler.request import Request
from worker.scheduler.step_time import StepTime

SURE: Final = 1.3
LOST: Final = 0.6
MIN_SHARE: Final = 1 / 16
"""Least share of the time of steps that prompts get, so that none starves."""
_MIN_YIELD: Final = 4.0
"""Least time of a chunk's tokens, relative to its fixed cost: smaller ones waste the engine."""
_ROUNDING_S: Final = 1e-9
_MAX_NEEDS: Final = 3
"""Most different paces needed by prompts that are compared."""


class _Tight(NamedTuple):
    """A decode that the prompts could make late; ``left``: its expected remaining tokens."""

    time_s: float
    work_s: float
    left: float
    whole: float
    """Expected tokens of the whole answer."""


class _Paced(NamedTuple):
    """A prompt that does not go at full speed; ``work_s``: seconds for it and those before it."""

    time_s: float
    work_s: float
    ages: bool
    """Whether it has no deadline, and so must not wait for ever."""


class Stalls:
    """Decides step by step; what a pace allows is saved up until it makes a chunk."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime) -> None:
        self._config = config
        self._step_time = step_time
        self._credit_s = 0.0
        """Time for prompts saved up, at most that of one step."""

    def prompt_tokens(
        self, decoding: Sequence[Row], prompts: Sequence[Request], most: int, now: float
    ) -> int:
        """Number of tokens, 0 to ``most``, of ``prompts`` (in order) with these decodes."""
        times, plain_s = self._step_time, self._step_time.plain_step_s
        if not times.prompt_token_s or not plain_s or not most or now == -math.inf:
            return most
        left = [len(one.tokens) - one.computed for one in prompts]
        cost = _Cost(times.chunk_s, times.further_token_s, most)
        tight = self._tight(decoding, cost.seconds(sum(left)), plain_s, now)
        if not tight:
            self._credit_s = 0.0
            return most
        spare_s = min(row.time_s / SURE - row.work_s for row in tight)
        soonest_s = min(row.work_s for row in tight)
        at_once = self._at_once(left, cost, max(spare_s, soonest_s / len(tight)))
        if at_once >= most or at_once == sum(left):
            return min(most, at_once)
        paced = self._paced(prompts, left, cost, at_once, now)
        self._credit_s += self._pace_s(tight, paced, plain_s, cost.full_s)
        self._credit_s = min(cost.full_s, self._credit_s)
        tokens = self._chunk(len(decoding) + at_once, cost, sum(left) - at_once)
        if tokens:
            self._credit_s = max(0.0, self._credit_s - cost.chunk_s - tokens * cost.token_s)
        return min(most, at_once + tokens)

    def _tight(
        self, decoding: Sequence[Row], backlog_s: float, plain_s: float, now: float
    ) -> list[_Tight]:
        """Rows that may end in time, but not surely if all prompts went before them."""
        tight = []
        for row in decoding:
            job = row.request.job
            time_s = min(job.deadline, job.due_by) - now
            left = expected_left(row.request, self._step_time)
            work_s = left * plain_s
            if LOST * work_s < time_s < SURE * (work_s + backlog_s):
                tight.append(_Tight(time_s, work_s, left, row.request.generated + left))
        return tight

    @staticmethod
    def _at_once(left: Sequence[int], cost: "_Cost", within_s: float) -> int:
        """Tokens of the first prompts that can be computed whole ``within_s``."""
        tokens = 0
        for count in left:
            if cost.seconds(tokens + count) > within_s:
                break
            tokens += count
        return tokens

    def _paced(
        self,
        prompts: Sequence[Request],
        left: Sequence[int],
        cost: "_Cost",
        at_once: int,
        now: float,
    ) -> list[_Paced]:
        paced, ahead = [], 0
        for request, count in zip(prompts, left, strict=True):
            ahead += count
            if ahead > at_once:
                work_s = cost.seconds(ahead)
                time_s = prompt_due(request, self._step_time) - now
                paced.append(_Paced(time_s, work_s, request.job.deadline == math.inf))
        return paced

    def _pace_s(
        self, tight: Sequence[_Tight], paced: Sequence[_Paced], plain_s: float, most_s: float
    ) -> float:
        """The pace: seconds of prompts per step."""
        if any(one.ages and one.time_s < SURE * one.work_s for one in paced):
            return most_s
        borne_s = min((row.time_s / SURE - row.work_s) / row.left for row in tight)
        pace_s = min(most_s, max(borne_s, MIN_SHARE * plain_s))
        needs: list[float] = []
        for prompt in paced:
            least_s = prompt.work_s * (plain_s + most_s) / most_s
            if LOST * least_s < prompt.time_s:  # else it is late however fast it goes
                share = min(1.0, SURE * prompt.work_s / prompt.time_s)
                need_s = most_s if share == 1.0 else min(most_s, plain_s * share / (1 - share))
                if need_s > max([pace_s, *needs]):
                    needs.append(need_s)
        if not needs:
            return pace_s
        backlog_s = paced[-1].work_s

        def chances(pace_s: float) -> float:
            step_s = plain_s + pace_s
            stretch = step_s / pace_s
            rows = 0.0
            for row in tight:
                needed_s = row.work_s + min(backlog_s, row.left * pace_s)
                turns = backlog_s * stretch / (row.whole * step_s)
                rows += _chance(row.time_s, needed_s) * max(1.0, turns)
            return rows + sum(_chance(one.time_s, one.work_s * stretch) for one in paced)

        return max([pace_s, *needs[:_MAX_NEEDS]], key=chances)

    def _chunk(self, others: int, cost: "_Cost", left: int) -> int:
        """Tokens of the credit to spend with ``others``, of ``left`` paced ones: what ends a tile,
        at least a block, or all that a step carries or is left; 0 while that would take little more
        than any chunk does."""
        largest = min(cost.most, left)
        tokens = min(largest, cost.tokens_within(self._credit_s))
        if tokens == largest:
            return tokens
        tokens -= (others + tokens) % self._config.tile_tokens
        if tokens * cost.token_s < _MIN_YIELD * cost.chunk_s:
            return 0
        return tokens if tokens >= min(largest, self._config.block_tokens) else 0


class _Cost(NamedTuple):
    """Time that prompts add to decodes: ``chunk_s`` for a chunk of at most ``most`` tokens, and
    ``token_s`` for each of them."""

    chunk_s: float
    token_s: float
    most: int

    @property
    def full_s(self) -> float:
        """Time of the largest chunk."""
        return self.chunk_s + self.most * self.token_s

    def seconds(self, tokens: int) -> float:
        """Time of ``tokens`` in the largest chunks."""
        return -(-tokens // self.most) * self.chunk_s + tokens * self.token_s

    def tokens_within(self, seconds: float) -> int:
        """Tokens of a chunk that takes ``seconds`` at most."""
        if seconds >= self.full_s - _ROUNDING_S:
            return self.most
        return max(0, int((seconds - self.chunk_s) / max(self.token_s, _ROUNDING_S)))


def _chance(time_s: float, needed_s: float) -> float:
    return min(1.0, max(0.0, (time_s / needed_s - LOST) / (SURE - LOST)))
