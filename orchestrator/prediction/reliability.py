"""Learns what a predicted chance really comes to, from the outcomes of earlier predictions.

Outcomes are counted in bins of the predicted chance (Zadrozny and Elkan 2001), and the bins' shares
are made to rise with it by pooling neighbours that do not (isotonic regression, Zadrozny and Elkan
2002). Every bin begins with some weight for a prediction that is right, and old outcomes lose
theirs.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EDGES: Final = (0.02, *(at / 10 for at in range(1, 10)), 0.98)
"""Chances at which the bins meet; the first and last are narrow, since much is nearly certain."""
BINS: Final = len(EDGES) + 1
PRIOR: Final = 8.0
"""Weight, in outcomes, of the belief that a prediction means what it says."""
HALF_LIFE: Final = 256
"""Outcomes after which an outcome has half its weight."""
_KEPT: Final = 0.5 ** (1 / HALF_LIFE)
_MIDDLES: Final = np.convolve((0.0, *EDGES, 1.0), (0.5, 0.5), "valid")


class ChanceBin(NamedTuple):
    """Outcomes of the predictions of one bin, without any loss of weight."""

    given: int
    chances: float
    """Sum of the chances that were predicted; ``met`` should come out about as large."""
    met: int


class Reliability:
    """Maps predicted chances to calibrated ones."""

    def __init__(self) -> None:
        self.bins = [ChanceBin(0, 0.0, 0)] * BINS
        self._weights = np.zeros(BINS)
        self._chances = np.zeros(BINS)
        self._met = np.zeros(BINS)

    def add(self, chance: float, *, met: bool) -> None:
        """Learn from a prediction's outcome; ``chance`` as it was predicted, not calibrated."""
        at = int(np.searchsorted(EDGES, chance, side="right"))
        given, chances, all_met = self.bins[at]
        self.bins[at] = ChanceBin(given + 1, chances + chance, all_met + met)
        for sums, more in ((self._weights, 1.0), (self._chances, chance), (self._met, float(met))):
            sums *= _KEPT
            sums[at] += more

    def calibrated(self, chance: float) -> float:
        """The share of such predictions that is met, by what is known."""
        weights = self._weights + PRIOR
        predicted = (self._chances + PRIOR * _MIDDLES) / weights
        met = (self._met + PRIOR * _MIDDLES) / weights
        return float(np.interp(chance, predicted, _rising(met, weights)))


def _rising(values: Floats, weights: Floats) -> Floats:
    """The rising sequence that is nearest to ``values`` by weighted squares (pool adjacent
    violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = float(value), float(weight), 1
        while pools and pools[-1][0] >= pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            mean = (before[0] * before[1] + pool[0] * pool[1]) / both
            pool = mean, both, before[2] + pool[2]
        pools.append(pool)
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
