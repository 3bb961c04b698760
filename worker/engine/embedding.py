"""The last step of an embedding."""

import numpy as np
from numpy.typing import NDArray


def normalised(vector: NDArray[np.float32]) -> bytes:
    """``vector`` scaled to length 1, little-endian float32; a sum of states does as a mean."""
    wide = vector.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), 1e-12)).astype("<f4").tobytes()
