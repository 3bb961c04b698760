"""Fits the costs of a step to measured step times: a base, rows, prompt and context tokens.

A Kalman filter (Haykin, *Adaptive Filter Theory*, ch. 14; Anderson and Moore, *Optimal Filtering*,
8.2) over the logarithms of the coefficients. Their drift has two parts: the machine's speed, which
moves all coefficients alike, and the ratios between base, row and token, which hardly change. So a
longer step means a slower machine unless steps with more or fewer rows contradict. The filter also
learns the scatter of steps.
"""

import math
from collections.abc import Sequence
from typing import Final

from orchestrator.prediction.step_model import LEAST_SPREAD, SELDOM

_SPEED_DRIFT: Final = 0.04**2
"""Variance by which the machine's speed drifts from window to window, as a logarithm."""
_SHAPE_DRIFT: Final = 0.002**2
"""Variance by which each coefficient drifts apart from the others. In a simulation of steps that
scatter by 20 to 30 %, with stalls and speed changes, the ratio of steps with 16 rows to those with
64 stayed within 0.37 and 0.52 (5 % to 95 %); the true value was 0.44. A filter without the two
parts, with a fixed noise, gave anything from 0.25 to 1."""
_FIRST_NOISE: Final = 0.1
"""Noise before any step was seen, and the variance that a new speed adds: steps scatter by 30 %."""
SMOOTHING: Final = 1 / 16
"""Weight of the latest window in the moving averages."""


class StepFilter:
    """Learns from windows of steps. A window's error counts as a share of the whole step."""

    def __init__(self, guess: Sequence[float], variance: float) -> None:
        """``variance``: variance of the logarithm of each coefficient of ``guess``."""
        self.coefficients = list(guess)
        """Milliseconds of a step's base, per row, per prompt token and per context token."""
        self.noise = _FIRST_NOISE
        """Variance of the logarithm of a window's time around the prediction."""
        each = range(len(guess))
        self._covariance = [[variance * (i == j) for j in each] for i in each]
        self._odd = 0.0
        """Sign of the last surprise if it was too large to learn from, otherwise 0."""

    def predicted(self, features: Sequence[float]) -> float:
        """Milliseconds of a step with these features: 1, rows, prompt tokens, context tokens."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def doubt(self, features: Sequence[float]) -> float:
        """Standard deviation of the logarithm of the prediction, from the uncertainty of the
        coefficients: large if such steps were never seen."""
        shares, own = self._shares(features), self._covariance
        each = range(len(shares))
        return math.sqrt(sum(shares[i] * own[i][j] * shares[j] for i in each for j in each))

    def speed_up(self, ratio: float) -> None:
        """Assume that all steps take ``ratio`` times as long."""
        self.coefficients = [c * ratio for c in self.coefficients]

    def fit(self, features: Sequence[float], step_ms: float) -> bool:
        """Learn from a window's mean step. True if it showed a new speed of the machine."""
        ratio = step_ms / self.predicted(features)
        surprise = math.log(ratio)
        self._loosen(_SPEED_DRIFT)
        shares, covariance = self._shares(features), self._covariance
        each = range(len(shares))
        for i in each:
            covariance[i][i] += _SHAPE_DRIFT
        weighed = [sum(covariance[i][j] * shares[j] for j in each) for i in each]
        unsure = sum(weighed[i] * shares[i] for i in each)
        total = self.noise + unsure
        self._learn_noise(surprise, unsure)
        if abs(surprise) > SELDOM * math.sqrt(total):
            # One outlier may be a stall of the machine; two in a row are a new speed.
            before, self._odd = self._odd, math.copysign(1.0, surprise)
            if before != self._odd:
                return False
            self.speed_up(ratio)
            self._loosen(_FIRST_NOISE)
            self._odd = 0.0
            return True
        self._odd = 0.0
        for i in each:
            self.coefficients[i] *= math.exp(weighed[i] / total * surprise)
            for j in each:
                covariance[i][j] -= weighed[i] * weighed[j] / total
        return False

    def _loosen(self, variance: float) -> None:
        for row in self._covariance:
            row[:] = [each + variance for each in row]

    def _learn_noise(self, surprise: float, unsure: float) -> None:
        # The less was known, the less a surprise says about the noise.
        total = self.noise + unsure
        seen = max(min(surprise**2, SELDOM**2 * total) - unsure, 0.0)
        self.noise += SMOOTHING * self.noise / total * (seen - self.noise)
        self.noise = max(self.noise, LEAST_SPREAD**2)

    def _shares(self, features: Sequence[float]) -> list[float]:
        """Derivatives of a step's logarithm by the logarithm of each coefficient."""
        predicted = self.predicted(features)
        return [c * x / predicted for c, x in zip(self.coefficients, features, strict=True)]
