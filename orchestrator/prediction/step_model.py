"""Models an instance's step times, and the time of work in such steps: pure and frozen.

Every engine step computes some prompt tokens and one token for each running row::

    step_ms = base + row · rows + context · tokens of the rows' contexts + prompt · prompt tokens

``StepLearner`` fits the four costs and the scatter of steps around them.
"""

import math
from dataclasses import dataclass
from typing import Final

from protocol import CERTAIN_SHARE

ROW_SHARE = 0.08
"""Assumed cost of a row, as a share of a step's base, until many rows were seen. Measured on CPUs:
0.088 (the demo model), 0.076 (SmolLM2-135M); a GPU's rows cost less, as its first steps show."""
LEAST_SPREAD: Final = 0.09
"""Least error of a straight line through step times, as a logarithm: the demo model on an AMD EPYC
took 4.9, 8.8, 10.0 and 15.1 ms with 1, 8, 16 and 32 rows, which the best line misses by 9 % (root
mean square)."""
SELDOM: Final = 3.0
"""Standard deviations that a job's time rarely exceeds: one in 700 of a normal distribution."""
ERROR: Final = SELDOM * LEAST_SPREAD
"""Logarithm by which a prediction is rarely exceeded, until its own errors are known."""


@dataclass(frozen=True, slots=True)
class Work:
    """The size of one job. ``cached_tokens`` of the prompt need no prefill."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """An instance's present work: its jobs and the tokens that they still need.

    ``prefill_tokens`` are prompt tokens not yet computed, ``decode_tokens`` answers' tokens not
    yet generated, each over all running and waiting jobs together.
    """

    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int


IDLE = Load(0, 0, 0, 0)
FIRST_TOKEN = Work(1, 0, 1)
"""The least work that there is."""


@dataclass(frozen=True, slots=True)
class StepUnderLoad:
    """A ``StepModel`` under one load: everything that does not depend on the job, precomputed.

    For placement, which asks every instance: ``finish_ms`` equals that of the model with the load.
    All times are usual times in ms. ``ahead_tokens``: other jobs' prompt tokens that come first.
    """

    wait_ms: float
    chunk_ms: float
    prompt_token_ms: float
    step_ms: float
    ahead_tokens: int
    step_tokens: int
    tokens_per_s: float
    """Measured tokens per second of all jobs together; see ``StepModel``."""

    def finish_ms(self, new_tokens: int, output_tokens: int) -> float:
        """Ms from now for a job that computes ``new_tokens`` and makes ``output_tokens``."""
        prompt = (new_tokens if new_tokens > 1 else 1) + self.ahead_tokens
        return (
            self.wait_ms
            - (-prompt // self.step_tokens) * self.chunk_ms
            + prompt * self.prompt_token_ms
            + (output_tokens - 1) * self.step_ms
        )


@dataclass(frozen=True, slots=True)
class StepModel:
    """An instance's step times at one moment. Pure; a few microseconds an estimate.

    ``fastest_ms`` is the least measured time per token of a row, 0 until enough steps were seen.
    ``prompt_tokens_per_step`` is the mean number of other jobs' prompt tokens in recent steps, and
    ``context_per_row`` the mean context of their rows, in tokens.

    ``tokens_per_s`` is the measured rate of all jobs together in the best half second, 0 until
    measured. ``steps`` is the number of measured steps since the speed last jumped.
    """

    slots: int
    step_tokens: int
    base_ms: float
    row_ms: float
    prompt_token_ms: float
    prompt_tokens_per_step: float
    fastest_ms: float
    tokens_per_s: float
    steps: int
    spread: float
    """Standard deviation of the logarithm of step times around the model."""
    doubt: float
    """Uncertainty (0 to 1) about steps with every row taken."""
    bends: tuple[float, ...]
    """Maps each number of rows, from 0 on, to rows of a straight line: step time is not linear in
    rows. Empty if only a line is known."""
    context_token_ms: float
    context_per_row: float

    @property
    def is_foreseen(self) -> bool:
        """Whether steps of all sizes were measured when the engine was loaded."""
        return bool(self.bends)

    @property
    def careful_row_ms(self) -> float:
        """Cost of a row in ms; until many rows were seen, at least that of a slow machine."""
        return self.row_ms + self.doubt * max(0.0, ROW_SHARE * self.base_ms - self.row_ms)

    @property
    def known(self) -> bool:
        return self.fastest_ms > 0

    @property
    def slow(self) -> float:
        """The factor over the modeled time that a job rarely exceeds."""
        return math.exp(max(SELDOM * self.spread, ERROR))

    def step_ms(self, rows: int) -> float:
        return self.plain_step_ms(rows) + self.prompt_token_ms * self.prompt_tokens_per_step

    def plain_step_ms(self, rows: int) -> float:
        """Ms of a step with ``rows`` rows, usual contexts and no prompt."""
        rows = min(rows, self.slots)
        contexts_ms = self.context_token_ms * self.context_per_row * rows
        return self.base_ms + self.row_ms * (self.bends[rows] if self.bends else rows) + contexts_ms

    def finish_ms(self, work: Work, load: Load = IDLE) -> float:
        """Ms from now until the usual finish of ``work`` if it is sent now to an instance with
        ``load``."""
        new = work.prompt_tokens - work.cached_tokens
        return self.under(load).finish_ms(new, work.output_tokens)

    def upper_ms(self, work: Work, load: Load = IDLE) -> float:
        """Ms from now until a finish time that such a job rarely exceeds."""
        return self.finish_ms(work, load) * self.slow

    def under(self, load: Load) -> StepUnderLoad:
        """The model under one load: ``finish_ms`` for many jobs.

        A job that finds all slots taken waits until enough other jobs leave. Running jobs are half
        done on average, so jobs of mean length L leave at a rate of slots / (L · step).
        """
        jobs = load.running + load.waiting
        step = self.step_ms(jobs + 1)
        leavers, ahead = jobs + 1 - self.slots, load.prefill_tokens
        wait = step / 2 if load.running else 0.0
        if leavers > 0:
            length = load.decode_tokens / max(1.0, load.running / 2 + load.waiting)
            wait, ahead = leavers * length * step / self.slots, 0
        return StepUnderLoad(
            wait_ms=wait,
            chunk_ms=self.plain_step_ms(jobs + 1),
            prompt_token_ms=self.prompt_token_ms,
            step_ms=step,
            ahead_tokens=ahead,
            step_tokens=self.step_tokens,
            tokens_per_s=self.tokens_per_s,
        )

    def least_ms(self, tokens: int) -> float:
        """Least ms that an answer of ``tokens`` takes, for certain: not an average, and unaffected
        by slow moments. A cached prompt still needs a step. 0 until enough steps were seen."""
        return CERTAIN_SHARE * self.fastest_ms * tokens

    def service_ms(self, work: Work, rows: int | None = None) -> float:
        """Usual ms from start to finish among ``rows`` jobs; by default all slots run one."""
        rows = self.slots if rows is None else rows
        new = max(1, work.prompt_tokens - work.cached_tokens)
        steps = -(-new // self.step_tokens) + work.output_tokens - 1
        return steps * self.step_ms(rows) + new * self.prompt_token_ms

    def tokens_within(self, budget_ms: float, work: Work, rows: int | None = None) -> int:
        """The usual number of output tokens in ``budget_ms`` after ``work``'s prompt; 0 if none
        fit.
        """
        rows = self.slots if rows is None else rows
        left = budget_ms - self.service_ms(Work(work.prompt_tokens, work.cached_tokens, 1), rows)
        return 0 if left < 0 else 1 + int(left / self.step_ms(rows))
