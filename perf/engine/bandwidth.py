"""Speed at which this machine reads memory, measured beside what it is compared with."""

import time
from typing import Final

import torch

from perf.engine.rig import run_beside

_CPU_BYTES: Final = 512 * 2**20
_CUDA_BYTES: Final = 4 * 2**30


class Bandwidth:
    """Sums a buffer far beyond the caches with all threads; on CUDA copies one."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        elements = (_CUDA_BYTES if self._cuda else _CPU_BYTES) // 4
        self._buffer = run_beside(lambda: torch.ones(elements, device=device))
        self._out = torch.empty_like(self._buffer) if self._cuda else None
        self.samples: list[float] = []
        self.sample()
        self.samples.clear()

    def sample(self) -> None:
        """Add one sample, bytes per second."""
        self.samples.append(run_beside(self._measure))

    def _measure(self) -> float:
        begun = time.perf_counter()
        moved = self._buffer.nbytes
        if self._out is None:
            self._buffer.sum()
        else:
            self._out.copy_(self._buffer)
            torch.cuda.synchronize()
            moved *= 2
        return moved / (time.perf_counter() - begun)
