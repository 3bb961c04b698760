"""Learns an instance's step times from the differences between its worker's totals
(``step_filter``)."""

import math
from typing import Final

import numpy as np

from orchestrator.prediction.step_filter import SMOOTHING, StepFilter
from orchestrator.prediction.step_model import LEAST_SPREAD, ROW_SHARE, StepModel
from protocol import CERTAIN_AFTER_STEPS, CERTAIN_SHARE, StepCosts, WorkerStats

FIRST_STEP_MS = 20.0
"""Guessed time of a step of one row; the worker's earlier steps replace it."""
USUAL_S: Final = 10.0
"""Seconds over which the number of present requests, and prompts per step, are averaged: a burst of
prompts does not last. In the simulator, over twelve cells of two traces and sixteen more, 10 met as
many as the assumption that all running rows stay full, and 3 and 30 met 0.5 % less. Live, of 70
requests to SmolLM2 at 0.7 of its capacity, it met 64, 62 and 59, that assumption met 56, 53 and 60,
and fixed rows met 66 and 61."""
_WINDOW_MS = 500.0
"""Ms of steps that are compared with their prediction (about as long as deadlines), and over which
a token rate is measured."""
_GUESSED: Final = 1.4
"""Standard deviation of the logarithms of guessed coefficients: a GPU's row costs a sixteenth of
the guess, two of these."""
_AT_LOAD: Final = 0.4
"""The same for costs measured at load. A step of 64 rows took 11.3, 20.0 and 26.8 ms for three demo
models that were loaded next to busy processes."""
_CONTEXT_OF_A_ROW: Final = 1024
"""Guessed context tokens that cost as much as a row alone, if nothing was measured at load. 80 for
the demo model on a CPU; a GPU's memory is faster, and the first busy steps show how much."""
_MIN_SHARE: Final = 1e-3
"""Least value of a coefficient, as a share of a step: the filter takes logarithms."""
_BEGINNING: Final = WorkerStats(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0.0)
"""The statistics of a worker without any work yet."""


class StepLearner:
    """Learns one instance's step times from its statistics."""

    def __init__(self, slots: int, step_tokens: int, costs: StepCosts | None = None) -> None:
        """``costs``: step times measured when the engine was loaded; None if not measured."""
        self._slots = max(1, slots)
        self._step_tokens = max(1, step_tokens)
        self._bends: tuple[float, ...] = ()
        if costs is None:
            row_ms, prompt_ms = ROW_SHARE * FIRST_STEP_MS, FIRST_STEP_MS / self._step_tokens
            guess = (FIRST_STEP_MS, row_ms, prompt_ms, row_ms / _CONTEXT_OF_A_ROW)
            self._filter = StepFilter(guess, _GUESSED**2)
        else:
            line, self._bends = _line_of(costs, self._slots)
            self._filter = StepFilter(line, _AT_LOAD**2)
        self._doubt = 0.0 if costs is None else costs.doubt
        self._last: WorkerStats | None = None
        self._last_step_ms = 0.0
        self._prompts_per_step = self._context_per_row = 0.0
        self._fitted = costs is not None
        self._fastest_ms = math.inf
        self._bound_steps = 0
        """Number of steps since a step was last faster than the bound."""
        self._steps_at_pace = 0
        self._best_rate = 0.0
        """Highest tokens per second over at least ``_WINDOW_MS`` of steps, at the present speed."""
        self._rate_tokens, self._rate_ms = 0, 0.0
        self._last_running = 0
        self._model: StepModel | None = None
        self._known: tuple[float, ...] = ()
        """Coefficients at the start of the steps that are judged."""
        self._foretold_ms = self._judged_ms = 0.0
        self._square = LEAST_SPREAD**2

    @property
    def is_measured(self) -> bool:
        """Whether any steps were seen; until then the model is a guess.

        A worker's steps before the first report (compiling, warming up, another load) only improve
        the guess: an instance judged by a slow past may never get the work to show otherwise.
        """
        return self._fitted

    @property
    def model(self) -> StepModel:
        if self._model is None:
            known = self._bound_steps >= CERTAIN_AFTER_STEPS
            base, row, prompt, context = self._filter.coefficients
            self._model = StepModel(
                slots=self._slots,
                step_tokens=self._step_tokens,
                base_ms=base,
                row_ms=row,
                prompt_token_ms=prompt,
                prompt_tokens_per_step=self._prompts_per_step,
                context_token_ms=context,
                context_per_row=self._context_per_row,
                fastest_ms=self._bound_ms if known else 0.0,
                tokens_per_s=self._best_rate,
                steps=self._steps_at_pace,
                spread=math.hypot(math.sqrt(self._square), 0.0 if known else self._doubt),
                doubt=min(1.0, self._filter.doubt((1.0, float(self._slots), 0.0, 0.0))),
                bends=self._bends,
            )
        return self._model

    @property
    def _bound_ms(self) -> float:
        """The least time per token, in ms; valid after enough steps."""
        # An instance that was never idle has not shown its single-row speed: the fit predicts it.
        base, row, *_ = self._filter.coefficients
        return min(self._fastest_ms, base + row)

    def observe(self, stats: WorkerStats) -> None:
        """Learn from a worker's statistics; statistics without new steps change nothing."""
        if not (math.isfinite(stats.busy_ms_total) and math.isfinite(stats.step_ms)):
            return  # a forecast of NaN would refuse every request
        last, self._last = self._last, stats
        if not stats.steps_total:  # a worker without a step count reports only their mean
            if stats.step_ms > 0 and stats.step_ms != self._last_step_ms:
                self._last_step_ms = stats.step_ms
                self._fit([1.0, self._bent(stats.running), 0.0, 0.0], stats.step_ms)
                self._count(1, stats.running, stats.step_ms)
            return
        is_past = last is None or stats.steps_total < last.steps_total  # a process's first report
        if last is None or is_past:
            last = _BEGINNING
        steps = stats.steps_total - last.steps_total
        busy_ms = stats.busy_ms_total - last.busy_ms_total
        if steps <= 0 or busy_ms <= 0:
            return
        prompts = max(0, stats.prefill_tokens_total - last.prefill_tokens_total) / steps
        made = max(0, stats.tokens_total - last.tokens_total)
        rows = min(made / steps, self._slots)
        contexts = max(0, stats.context_tokens_total - last.context_tokens_total) / steps
        features = [1.0, self._bent(rows), prompts, contexts]
        # Some engines give a row several tokens a step: a row's share of them counts.
        per_row = max(1.0, made / steps / max(1, stats.running, self._last_running))
        self._last_running = stats.running
        token_ms = busy_ms / steps / per_row
        if token_ms < CERTAIN_SHARE * self._bound_ms:
            self._bound_steps = 0
        self._fastest_ms = min(self._fastest_ms, token_ms)
        if is_past:
            if not self._fitted:  # steps before the first report only improve the guess
                self._speed_up(features, busy_ms / steps)
            return
        recent = -math.expm1(-busy_ms / (1000 * USUAL_S))
        self._prompts_per_step += recent * (prompts - self._prompts_per_step)
        self._context_per_row += SMOOTHING * (contexts / max(rows, 1.0) - self._context_per_row)
        self._judge(features, steps, busy_ms)
        self._fit(features, busy_ms / steps)
        self._count(steps, made, busy_ms)

    def _bent(self, rows: float) -> float:
        """``rows`` (an average) mapped to the straight line (``StepModel.bends``)."""
        if not self._bends:
            return rows
        low = min(int(rows), self._slots - 1)
        first, second = self._bends[low : low + 2]
        return first + (rows - low) * (second - first)

    def _judge(self, features: list[float], steps: int, busy_ms: float) -> None:
        """Learn the error of half a second of steps against the prediction at its start. The
        filter's noise does not measure it: it starts large, so that the first steps teach."""
        if not self._fitted:
            return
        if not self._judged_ms:
            self._known = tuple(self._filter.coefficients)
        self._foretold_ms += steps * sum(c * x for c, x in zip(self._known, features, strict=True))
        self._judged_ms += busy_ms
        if self._judged_ms >= _WINDOW_MS:
            surprise = math.log(self._judged_ms / self._foretold_ms)
            self._square += SMOOTHING * (min(surprise**2, 1.0) - self._square)
            self._foretold_ms = self._judged_ms = 0.0

    def _count(self, steps: int, tokens: int, busy_ms: float) -> None:
        """Count the steps that predictions rest on, and their tokens."""
        self._bound_steps += steps
        self._steps_at_pace += steps
        self._rate_tokens += tokens
        self._rate_ms += busy_ms
        if self._rate_ms >= _WINDOW_MS:
            self._best_rate = max(self._best_rate, 1000 * self._rate_tokens / self._rate_ms)
            self._rate_tokens, self._rate_ms = 0, 0.0

    def _speed_up(self, features: list[float], step_ms: float) -> None:
        """Adopt a window's speed and keep the ratios of the coefficients."""
        self._filter.speed_up(step_ms / self._filter.predicted(features))
        self._model = None

    def _fit(self, features: list[float], step_ms: float) -> None:
        self._model = None
        if not self._fitted:
            self._fitted = True
            self._speed_up(features, step_ms)
            return
        if self._filter.fit(features, step_ms):
            self._steps_at_pace, self._best_rate = 0, 0.0


def _line_of(costs: StepCosts, slots: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The straight line through the steps of one row and of ``slots``, as a filter's coefficients,
    and each number of rows from 0 on mapped to that line: the identity if the measured shape is as
    uncertain as a line is wrong."""
    times = np.interp(np.arange(slots + 1), costs.rows, costs.step_ms)
    first_ms, last_ms = costs.step_ms[0], float(times[-1])
    row_ms = max((last_ms - first_ms) / max(1, slots - 1), _MIN_SHARE * first_ms)
    base_ms = max(first_ms - row_ms, _MIN_SHARE * first_ms)
    bends = np.arange(slots + 1.0)
    if costs.doubt < LEAST_SPREAD:
        bends = np.maximum.accumulate((times - base_ms) / row_ms).clip(0.0)
    prompt_ms = max(costs.prompt_token_ms, _MIN_SHARE * first_ms)
    context_ms = costs.context_token_ms or row_ms / _CONTEXT_OF_A_ROW
    return (base_ms, row_ms, prompt_ms, context_ms), tuple(bends.tolist())
