"""How long work takes on an instance: an online model of its steps, and of how wrong that is.

Every engine step computes some prompt tokens and one token for each running row::

    step_ms = a + b · rows + c · prompt tokens

``PaceLearner`` fits a, b and c to the differences between a worker's totals with a Kalman filter
whose coefficients drift (recursive least squares that forgets, without its wind-up when the load
stays the same; Haykin, Adaptive Filter Theory, ch. 14). What finished jobs took over what was
predicted for them is kept as a window of ratios: its quantiles turn the model's one figure into a
fast, a usual and a slow one. ``PaceModel`` is the frozen snapshot that admission and placement use.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from worker.protocol import WorkerStats

LOW, MID, HIGH = 0.005, 0.5, 0.98
"""Quantiles of the ratio of actual to predicted time: certainly not faster, usual, seldom slower.

``LOW`` is what a refusal rests on, so that fewer than one in a hundred is wrong (DL-7).
"""
LEARNT_JOBS = 30
"""Finished jobs before a lower bound is believed: ignorance refuses nobody."""

_WINDOW = 256
_OUTLIER = math.log(1.5)
_JUMP_AFTER = 2
_NOISE = 0.05**2
_DRIFT = 2e-4
_MOST_DOUBT = 100.0
_LEAST_SHARE = 1e-3
_MOST_RATIO = math.log(10.0)
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Work:
    """One job. ``cached_tokens`` of the prompt need no prefill."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance has to do already: its jobs, and the tokens that they still need.

    ``prefill_tokens`` are prompt tokens not yet computed, ``decode_tokens`` answers' tokens not
    yet generated, each over all running and waiting jobs together.
    """

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


IDLE = Load()
_NOTHING = Work(1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Milliseconds from now, usual case; ``upper_ms`` is a finish that few jobs exceed."""

    wait_ms: float
    prefill_ms: float
    decode_ms: float
    finish_ms: float
    upper_ms: float


@dataclass(frozen=True, slots=True)
class Pace:
    """A ``PaceModel`` under one load, worked out as far as it does not depend on the job.

    For placement, which asks it of every instance: ``finish_ms`` is that of the model and load.
    All times are usual ones, in ms. ``ahead_tokens`` are others' prompt tokens that come first.
    """

    wait_ms: float
    chunk_ms: float
    prompt_token_ms: float
    step_ms: float
    ahead_tokens: int
    step_tokens: int
    tokens_per_s: float
    """Of all jobs together, with every slot in use."""

    def finish_ms(self, new_tokens: int, output_tokens: int) -> float:
        """From now on, for a job with so many prompt tokens to compute and to generate."""
        prompt = (new_tokens if new_tokens > 1 else 1) + self.ahead_tokens
        return (
            self.wait_ms
            - (-prompt // self.step_tokens) * self.chunk_ms
            + prompt * self.prompt_token_ms
            + (output_tokens - 1) * self.step_ms
        )


@dataclass(frozen=True, slots=True)
class PaceModel:
    """An instance's pace at one moment. Pure; a few microseconds an estimate.

    ``ratios`` are the ``LOW``, ``MID`` and ``HIGH`` quantiles of actual over modelled time.
    ``prompt_tokens_per_step`` is what other jobs' prompts add to the steps of late. ``epoch``
    moves when the pace changes so much that jobs under way say nothing about the new one.
    """

    slots: int
    step_tokens: int
    base_ms: float
    row_ms: float
    prompt_token_ms: float
    prompt_tokens_per_step: float = 0.0
    ratios: tuple[float, float, float] = (0.0, 1.0, 2.0)
    epoch: int = 0

    @property
    def known(self) -> bool:
        """Whether a lower bound means anything yet."""
        return self.ratios[0] > 0

    def step_ms(self, rows: int) -> float:
        """A step of that many rows, with prompts as usual of late."""
        return (
            self.base_ms
            + self.row_ms * min(rows, self.slots)
            + self.prompt_token_ms * self.prompt_tokens_per_step
        )

    def finish_ms(self, work: Work, load: Load) -> float:
        """The usual finish from now on: ``estimate`` without the parts."""
        wait, prefill, decode = self._raw(work, load)
        return (wait + prefill + decode) * self.ratios[1]

    def estimate(self, work: Work, load: Load = IDLE) -> Estimate:
        """What ``work`` takes when it is sent now to an instance with that ``load``."""
        _, mid, high = self.ratios
        wait, prefill, decode = self._raw(work, load)
        total = wait + prefill + decode
        return Estimate(wait * mid, prefill * mid, decode * mid, total * mid, total * high)

    def under(self, load: Load) -> Pace:
        """``finish_ms`` for many jobs under the same load."""
        mid, jobs = self.ratios[1], load.running + load.waiting
        ahead = load.prefill_tokens if jobs < self.slots else 0
        return Pace(
            wait_ms=self._raw(_NOTHING, load)[0] * mid,
            chunk_ms=(self.base_ms + self.row_ms * min(jobs + 1, self.slots)) * mid,
            prompt_token_ms=self.prompt_token_ms * mid,
            step_ms=self.step_ms(jobs + 1) * mid,
            ahead_tokens=ahead,
            step_tokens=self.step_tokens,
            tokens_per_s=1000 * self.slots / (self.step_ms(self.slots) * mid),
        )

    def least_ms(self, work: Work) -> float:
        """What ``work`` takes at the very least: alone, at once, at the best pace of late.

        0 while that is not known.
        """
        new = max(1, work.prompt_tokens - work.cached_tokens)
        step = self.base_ms + self.row_ms
        steps = -(-new // self.step_tokens) + work.output_tokens - 1
        return (steps * step + new * self.prompt_token_ms) * self.ratios[0]

    def slow_ms(self, work: Work) -> float:
        """What few jobs exceed once they are started, with every slot in use."""
        return self._raw_service(work, self.slots) * self.ratios[2]

    def service_ms(self, work: Work) -> float:
        """The usual time from start to finish, with every slot in use."""
        return self._raw_service(work, self.slots) * self.ratios[1]

    def tokens_within(self, budget_ms: float, work: Work, *, slow: bool = True) -> int:
        """How many output tokens fit into ``budget_ms`` after ``work``'s prompt; 0 for none."""
        ratio = self.ratios[2] if slow else self.ratios[1]
        first = self._raw_service(Work(work.prompt_tokens, work.cached_tokens, 1), self.slots)
        left = budget_ms / ratio - first
        return 0 if left < 0 else 1 + int(left / self.step_ms(self.slots))

    def _raw_service(self, work: Work, rows: int) -> float:
        new = max(1, work.prompt_tokens - work.cached_tokens)
        steps = -(-new // self.step_tokens) + work.output_tokens - 1
        return steps * self.step_ms(rows) + new * self.prompt_token_ms

    def _raw(self, work: Work, load: Load) -> tuple[float, float, float]:
        """Wait, prefill and decode by the model alone.

        A job that finds all slots taken waits for as many others to leave as stand in its way.
        Running jobs are half done on average, so jobs of mean length L leave at a rate of
        slots / (L · step).
        """
        jobs = load.running + load.waiting
        step = self.step_ms(jobs + 1)
        leavers = jobs + 1 - self.slots
        token_ms = self.prompt_token_ms
        if leavers > 0:
            length = load.decode_tokens / max(1.0, load.running / 2 + load.waiting)
            wait = leavers * length * step / self.slots
            ahead = 0
        else:
            wait = step / 2 if load.running else 0.0
            ahead = load.prefill_tokens
        new = max(1, work.prompt_tokens - work.cached_tokens)
        chunks = -(-(new + ahead) // self.step_tokens)
        plain = self.base_ms + self.row_ms * min(jobs + 1, self.slots)
        prefill = chunks * plain + (new + ahead) * token_ms
        return wait, prefill, (work.output_tokens - 1) * step


class Quantiles:
    """Quantiles over a sliding window of values; starts from a prior that newer values push out."""

    def __init__(self, prior: Iterable[float], size: int = _WINDOW) -> None:
        self._recent = deque(prior)
        self._sorted = sorted(self._recent)
        self._size = size
        self.observed = 0

    def add(self, value: float) -> None:
        """Count a value; the oldest goes once the window is full (the prior counts as oldest)."""
        self.observed += 1
        self._recent.append(value)
        insort(self._sorted, value)
        surplus = len(self._recent) - self._size
        for _ in range(surplus):
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def at(self, share: float) -> float:
        """The value below which ``share`` of the window lies, between neighbours linearly."""
        place = share * (len(self._sorted) - 1)
        low = int(place)
        if low + 1 >= len(self._sorted):
            return self._sorted[-1]
        part = place - low
        return self._sorted[low] * (1 - part) + self._sorted[low + 1] * part

    def rank(self, value: float) -> float:
        """The share of the window below ``value``."""
        return bisect_left(self._sorted, value) / len(self._sorted)


class _Totals(NamedTuple):
    steps: int
    busy_ms: float
    tokens: int
    prompt_tokens: int


class PaceLearner:
    """Learns one instance's pace from its statistics and from jobs that finished on it."""

    def __init__(self, slots: int, step_tokens: int, *, first_guess_ms: float = 20.0) -> None:
        """``first_guess_ms`` is a step of one row; the first statistics replace it."""
        self._slots = max(1, slots)
        self._step_tokens = max(1, step_tokens)
        self._coefficients = [
            0.7 * first_guess_ms,
            0.3 * first_guess_ms / self._slots,
            first_guess_ms / self._step_tokens,
        ]
        self._guess = tuple(self._coefficients)
        # Doubt is counted in these, so that it means the same for all three coefficients.
        self._units = list(self._coefficients)
        self._doubt = _identity(_MOST_DOUBT)
        self._last: _Totals | None = None
        self._last_step_ms = 0.0
        self._prompts_per_step = 0.0
        self._fitted = False
        self._odd = 0
        self._epoch = 0
        # ± 40 % around 1, as log ratios.
        self._ratios = Quantiles([math.log(0.6 + 0.08 * i) for i in range(11)])
        self._model: PaceModel | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the pace is more than a first guess."""
        return self._fitted

    @property
    def model(self) -> PaceModel:
        """The pace as known now."""
        if self._model is None:
            known = self._ratios.observed >= LEARNT_JOBS
            base, row, prompt = self._coefficients
            self._model = PaceModel(
                slots=self._slots,
                step_tokens=self._step_tokens,
                base_ms=base,
                row_ms=row,
                prompt_token_ms=prompt,
                prompt_tokens_per_step=self._prompts_per_step,
                ratios=(
                    math.exp(self._ratios.at(LOW)) if known else 0.0,
                    math.exp(self._ratios.at(MID)),
                    math.exp(self._ratios.at(HIGH)),
                ),
                epoch=self._epoch,
            )
        return self._model

    def observe(self, stats: WorkerStats) -> None:
        """Take in a worker's statistics; those without new steps change nothing."""
        now = _Totals(
            stats.steps_total, stats.busy_ms_total, stats.tokens_total, stats.prefill_tokens_total
        )
        last, self._last = self._last, now
        if not now.steps:  # a worker that does not count its steps tells their mean only
            if stats.step_ms > 0 and stats.step_ms != self._last_step_ms:
                self._last_step_ms = stats.step_ms
                self._fit([1.0, float(stats.running), 0.0], stats.step_ms)
            return
        if last is None or now.steps < last.steps:  # the first word, or of another process
            last = _Totals(0, 0.0, 0, 0) if last is not None or now.steps < 1000 else now
        steps = now.steps - last.steps
        busy_ms = now.busy_ms - last.busy_ms
        if steps <= 0 or busy_ms <= 0:
            return
        prompts = max(0, now.prompt_tokens - last.prompt_tokens) / steps
        rows = min(max(0, now.tokens - last.tokens) / steps, self._slots)
        self._prompts_per_step += _SMOOTHING * (prompts - self._prompts_per_step)
        self._fit([1.0, rows, prompts], busy_ms / steps)

    def finished(self, model: PaceModel, load: Load, work: Work, service_ms: float) -> None:
        """A job took ``service_ms`` from dispatch to its end; ``work`` has what it really was.

        ``model`` and ``load`` are those that it was dispatched by. Only of jobs that ran to their
        own end: one that was cut short says nothing.
        """
        if model.epoch != self._epoch or service_ms <= 0:
            return
        modelled = model.finish_ms(work, load) / model.ratios[1]
        if modelled > 0:
            ratio = math.log(service_ms / modelled)
            self._ratios.add(min(max(ratio, -_MOST_RATIO), _MOST_RATIO))
            self._model = None

    def _fit(self, features: list[float], step_ms: float) -> None:
        """One step of the filter; what counts is the error as a share of the whole step."""
        self._model = None
        predicted = sum(c * x for c, x in zip(self._coefficients, features, strict=True))
        ratio = step_ms / predicted
        if not self._fitted:
            self._fitted = True
            self._rescale(ratio, features, step_ms)
            return
        doubt, units = self._doubt, self._units
        x = [f * unit / predicted for f, unit in zip(features, units, strict=True)]
        for i in range(3):
            doubt[i][i] = min(doubt[i][i] + _DRIFT, _MOST_DOUBT)
        px = [sum(doubt[i][j] * x[j] for j in range(3)) for i in range(3)]
        total = _NOISE + sum(x[i] * px[i] for i in range(3))
        surprise = math.log(ratio)
        if abs(surprise) > max(_OUTLIER, 3 * math.sqrt(total)):
            # One odd window may be a pause of the machine; two in a row are a new pace.
            self._odd = max(1, self._odd + 1) if surprise > 0 else min(-1, self._odd - 1)
            if abs(self._odd) >= _JUMP_AFTER:
                self._rescale(ratio, features, step_ms)
                self._epoch += 1
            return
        self._odd = 0
        for i in range(3):
            # None may fall to nothing or below: more work never takes less time.
            moved = self._coefficients[i] + px[i] / total * (ratio - 1) * units[i]
            self._coefficients[i] = max(moved, _LEAST_SHARE * units[i])
        for i in range(3):
            for j in range(3):
                doubt[i][j] -= px[i] * px[j] / total

    def _rescale(self, ratio: float, features: list[float], step_ms: float) -> None:
        """A pace that is new: the shape is kept, and open to doubt again."""
        self._coefficients = [c * ratio for c in self._coefficients]
        guessed = sum(c * x for c, x in zip(self._guess, features, strict=True))
        # Of a coefficient that had come to nothing, its own size would be no measure of doubt.
        self._units = [
            max(c, guess * step_ms / guessed)
            for c, guess in zip(self._coefficients, self._guess, strict=True)
        ]
        self._doubt = _identity(_MOST_DOUBT)
        self._odd = 0


class LengthLearner:
    """How much of ``max_tokens`` answers really use, as a distribution of shares."""

    def __init__(self) -> None:
        self._shares = Quantiles([(i + 0.5) / 16 for i in range(16)])

    @property
    def observed(self) -> int:
        return self._shares.observed

    def finished(self, tokens: int, max_tokens: int) -> None:
        """An answer came to its own end, by a stop or by ``max_tokens``."""
        self._shares.add(min(1.0, tokens / max_tokens))

    def cut(self, tokens: int, max_tokens: int) -> None:
        """An answer was cut short: it would have been longer, as the median of longer ones."""
        rank = self._shares.rank(tokens / max_tokens)
        self._shares.add(self._shares.at((1 + rank) / 2))

    def tokens(self, max_tokens: int, share: float) -> int:
        """The quantile ``share`` of the length; at least 1."""
        return max(1, min(max_tokens, math.ceil(self._shares.at(share) * max_tokens)))


def _identity(value: float) -> list[list[float]]:
    return [[value if i == j else 0.0 for j in range(3)] for i in range(3)]
