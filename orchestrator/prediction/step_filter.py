"""Fits what a step takes to what steps took: a base, each row, each token of a prompt.

Both filters here are Kalman filters (Haykin, *Adaptive Filter Theory*, ch. 14; Anderson and Moore,
*Optimal Filtering*, 8.2) whose state drifts in two parts. Nearly always it is the machine's speed
that changes, by which all three coefficients move alike; what a base is beside a row and a prompt's
token hardly does. So a step that took longer is the machine's doing unless others with more or
fewer rows say otherwise.

``CalmFilter`` expects steps that take what they must. It is linear, so that a few windows show the
shape. Where steps scatter it takes noise for the shape, by which it is decided how many rows run.
``NoisyFilter`` learns how much they scatter, over the coefficients' logarithms, and needs minutes
for the shape. They run beside each other, and whichever foretells steps better is believed (Magill,
"Optimal adaptive estimation of sampled stochastic processes", 1965).
"""

import math
from collections.abc import Sequence
from typing import Final

_OUTLIER: Final = math.log(1.5)
_JUMP_AFTER: Final = 2
_JUMP_VARIANCE: Final = 0.1
"""Variance of the speed after a jump, as a logarithm."""
_SHAPE_DRIFT: Final = 0.002**2
"""Variance by which each coefficient drifts beside the others. In a simulation of steps that
scatter by 20 to 30 %, with stalls and a speed that changes, the ratio of steps with 16 rows to
those with 64 stayed within 0.37 and 0.52 (5 % to 95 %) where it was 0.44. A filter without the two
parts, of a fixed noise, said anything from 0.25 to 1."""
_MEMORY: Final = 0.97
"""Weight of how well earlier windows were foretold, for each window since."""
_MAX_SQUARES: Final = 9.0
"""Most that a window counts by its distance from what was foretold, in variances: a stall of the
machine says nothing of the noise."""

Covariance = list[list[float]]


class StepFilter:
    """What both filters do. A window's error counts as a share of the whole step."""

    speed_drift: float
    """Variance by which the machine's speed drifts from window to window, as a logarithm."""

    def __init__(self, guess: Sequence[float], first_variance: float, noise: float) -> None:
        self.coefficients = list(guess)
        """Milliseconds of a step's base, of a row, of a prompt's token."""
        self.noise = noise
        """Variance of a window's time around what is predicted, as a logarithm."""
        self.score = 0.0
        """Log likelihood of the latest windows as they were foretold."""
        self._covariance: Covariance = [
            [first_variance * (i == j) for j in range(3)] for i in range(3)
        ]
        self._odd = 0

    def predicted(self, features: Sequence[float]) -> float:
        """Milliseconds of a step with these features: 1, rows, tokens of prompts."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def doubt(self, features: Sequence[float]) -> float:
        """Standard deviation of the logarithm of what is predicted, for what is not known of the
        coefficients: large where such steps were never seen."""
        shares, own = self._shares(features), self._covariance
        return math.sqrt(sum(shares[i] * own[i][j] * shares[j] for i in range(3) for j in range(3)))

    def speed_up(self, ratio: float) -> None:
        """Take all steps to take ``ratio`` times as long."""
        self.coefficients = [c * ratio for c in self.coefficients]

    def begin_with(self, coefficients: Sequence[float], variances: Sequence[float]) -> None:
        """Know what another filter has learnt of the same steps; ``variances`` are those of the
        coefficients' logarithms."""
        self.coefficients = list(coefficients)
        scales = self._scales()
        self._covariance = [
            [variances[i] * scales[i] ** 2 * (i == j) for j in range(3)] for i in range(3)
        ]
        self._odd = 0

    @property
    def variances(self) -> list[float]:
        return [self._covariance[i][i] / scale**2 for i, scale in enumerate(self._scales())]

    def fit(self, features: Sequence[float], step_ms: float) -> bool:
        """Take in a window's mean step; True if it showed another speed of the machine."""
        ratio = step_ms / self.predicted(features)
        surprise = math.log(ratio)
        shares = self._shares(features)
        weighed, unsure = self._pass(shares)
        total = self.noise + unsure
        squares = min(surprise**2 / total, _MAX_SQUARES)
        self.score = _MEMORY * self.score - (math.log(total) + squares) / 2
        self._learn_noise(surprise, unsure)
        if abs(surprise) > max(_OUTLIER, 3 * math.sqrt(total)):
            # One odd window may be a stall of the machine; two in a row are a new speed.
            self._odd = max(1, self._odd + 1) if surprise > 0 else min(-1, self._odd - 1)
            if abs(self._odd) < _JUMP_AFTER:
                return False
            self.speed_up(ratio)
            self._loosen(_JUMP_VARIANCE)
            self._odd = 0
            return True
        self._odd = 0
        self._move([each / total for each in weighed], ratio)
        for i in range(3):
            for j in range(3):
                self._covariance[i][j] -= weighed[i] * weighed[j] / total
        return False

    def _pass(self, shares: Sequence[float]) -> tuple[list[float], float]:
        """Let a window pass. Returns the covariance of each coefficient with a step that consists
        of these ``shares``, and the variance of what is predicted for that."""
        self._loosen(self.speed_drift)
        for i, scale in enumerate(self._scales()):
            self._covariance[i][i] += _SHAPE_DRIFT * scale**2
        covariance = self._covariance
        weighed = [sum(covariance[i][j] * shares[j] for j in range(3)) for i in range(3)]
        return weighed, sum(weighed[i] * shares[i] for i in range(3))

    def _loosen(self, variance: float) -> None:
        scales = self._scales()
        for i in range(3):
            for j in range(3):
                self._covariance[i][j] += variance * scales[i] * scales[j]

    def _learn_noise(self, surprise: float, unsure: float) -> None:
        """Learn from a surprise, where the noise is not fixed."""

    def _scales(self) -> Sequence[float]:
        """How far each number of the state moves where its coefficient's logarithm moves by 1."""
        raise NotImplementedError

    def _shares(self, features: Sequence[float]) -> list[float]:
        """How a step's logarithm moves with each number of the state."""
        raise NotImplementedError

    def _move(self, gains: Sequence[float], ratio: float) -> None:
        """Move the coefficients for a step that took ``ratio`` times as long as foretold."""
        raise NotImplementedError


class CalmFilter(StepFilter):
    """Expects steps to scatter by a few percent. Its state is the coefficients themselves, in units
    of what they are first taken for."""

    speed_drift = 0.004**2
    _VARIANCE: Final = 100.0
    _NOISE: Final = 0.02**2
    _MIN_SHARE: Final = 1e-3
    """Least of a coefficient, in its unit: more work never takes less time."""

    def __init__(self, guess: Sequence[float]) -> None:
        super().__init__(guess, self._VARIANCE, self._NOISE)
        self._units = list(guess)

    def speed_up(self, ratio: float) -> None:
        super().speed_up(ratio)
        self._units = [unit * ratio for unit in self._units]

    def begin_with(self, coefficients: Sequence[float], variances: Sequence[float]) -> None:
        self._units = list(coefficients)
        super().begin_with(coefficients, variances)

    def _scales(self) -> Sequence[float]:
        return [c / unit for c, unit in zip(self.coefficients, self._units, strict=True)]

    def _shares(self, features: Sequence[float]) -> list[float]:
        predicted = self.predicted(features)
        return [x * unit / predicted for x, unit in zip(features, self._units, strict=True)]

    def _move(self, gains: Sequence[float], ratio: float) -> None:
        for i, unit in enumerate(self._units):
            moved = self.coefficients[i] + gains[i] * (ratio - 1) * unit
            self.coefficients[i] = max(moved, self._MIN_SHARE * unit)


class NoisyFilter(StepFilter):
    """Learns how much steps scatter. Its state is the coefficients' logarithms."""

    speed_drift = 0.04**2
    _VARIANCE: Final = 2.0
    _FIRST_NOISE, _MIN_NOISE = 0.3**2, 0.05**2
    _SMOOTHING: Final = 1 / 32
    _MAX_MOVE: Final = 3.0
    """Most that a window moves a coefficient's logarithm."""

    def __init__(self, guess: Sequence[float]) -> None:
        super().__init__(guess, self._VARIANCE, self._FIRST_NOISE)

    def _learn_noise(self, surprise: float, unsure: float) -> None:
        # A surprise says the less of the noise the less was known.
        total = self.noise + unsure
        seen = max(min(surprise**2, 9 * total) - unsure, 0.0)
        self.noise += self._SMOOTHING * self.noise / total * (seen - self.noise)
        self.noise = max(self.noise, self._MIN_NOISE)

    def _scales(self) -> Sequence[float]:
        return (1.0, 1.0, 1.0)

    def _shares(self, features: Sequence[float]) -> list[float]:
        predicted = self.predicted(features)
        return [c * x / predicted for c, x in zip(self.coefficients, features, strict=True)]

    def _move(self, gains: Sequence[float], ratio: float) -> None:
        surprise = math.log(ratio)
        for i, gain in enumerate(gains):
            move = min(max(gain * surprise, -self._MAX_MOVE), self._MAX_MOVE)
            self.coefficients[i] *= math.exp(move)
