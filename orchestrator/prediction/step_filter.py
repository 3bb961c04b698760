"""Fits what a step takes to what steps took: a base, each row, each token of prompts and contexts.

A Kalman filter (Haykin, *Adaptive Filter Theory*, ch. 14; Anderson and Moore, *Optimal Filtering*,
8.2) over the logarithms of the coefficients, whose state drifts in two parts. Nearly always it is
the machine's speed that changes, by which all move alike; the ratios between a base, a row and a
token hardly do. So a step that took longer is the machine's doing unless others with more or fewer
rows say otherwise. How much steps scatter is learned as well.
"""

import math
from collections.abc import Sequence
from typing import Final

from orchestrator.prediction.step_model import SELDOM

_OUTLIER: Final = 0.4
"""Surprise, as a logarithm, from which a window may be odd: half as long again as foretold."""
_SPEED_DRIFT: Final = 0.04**2
"""Variance by which the machine's speed drifts from window to window, as a logarithm."""
_SHAPE_DRIFT: Final = 0.002**2
"""Variance by which each coefficient drifts apart from the others. In a simulation of steps that
scatter by 20 to 30 %, with stalls and a speed that changes, the ratio of steps with 16 rows to
those with 64 stayed within 0.37 and 0.52 (5 % to 95 %) where it was 0.44. A filter without the two
parts, of a fixed noise, said anything from 0.25 to 1."""
_FIRST_NOISE: Final = 0.1
"""Noise before steps were seen, and what a new speed adds to the doubt: steps scatter by 30 %."""
_MIN_NOISE: Final = 0.05**2
SMOOTHING: Final = 1 / 16
"""Weight of the latest window in the moving averages."""


class StepFilter:
    """Learns from windows of steps. A window's error counts as a share of the whole step."""

    def __init__(self, guess: Sequence[float], variance: float) -> None:
        """``variance`` is that of the logarithm of each coefficient of ``guess``."""
        self.coefficients = list(guess)
        """Milliseconds of a step's base, of a row, of a token of a prompt, of one of a context."""
        self.noise = _FIRST_NOISE
        """Variance of a window's time around what is predicted, as a logarithm."""
        each = range(len(guess))
        self._covariance = [[variance * (i == j) for j in each] for i in each]
        self._odd = 0.0
        """Sign of the last surprise, if that was too large to learn from."""

    def predicted(self, features: Sequence[float]) -> float:
        """Milliseconds of a step with these features: 1, rows, tokens of prompts, of contexts."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def doubt(self, features: Sequence[float]) -> float:
        """Standard deviation of the logarithm of what is predicted, for what is not known of the
        coefficients: large where such steps were never seen."""
        shares, own = self._shares(features), self._covariance
        each = range(len(shares))
        return math.sqrt(sum(shares[i] * own[i][j] * shares[j] for i in each for j in each))

    def speed_up(self, ratio: float) -> None:
        """Take all steps to take ``ratio`` times as long."""
        self.coefficients = [c * ratio for c in self.coefficients]

    def fit(self, features: Sequence[float], step_ms: float) -> bool:
        """Take in a window's mean step; True if it showed another speed of the machine."""
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
        if abs(surprise) > max(_OUTLIER, SELDOM * math.sqrt(total)):
            # One odd window may be a stall of the machine; two in a row are a new speed.
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
        # A surprise says the less of the noise the less was known.
        total = self.noise + unsure
        seen = max(min(surprise**2, SELDOM**2 * total) - unsure, 0.0)
        self.noise += SMOOTHING * self.noise / total * (seen - self.noise)
        self.noise = max(self.noise, _MIN_NOISE)

    def _shares(self, features: Sequence[float]) -> list[float]:
        """How a step's logarithm moves with that of each coefficient."""
        predicted = self.predicted(features)
        return [c * x / predicted for c, x in zip(self.coefficients, features, strict=True)]
