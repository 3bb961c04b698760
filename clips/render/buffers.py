"""Buffers for clips: allocated once at start, and lent to one clip at a time (SL-3).

A clip gets a ``Lease`` with views of preallocated tensors; nothing is copied or allocated for it.
Only the lease can return its buffers, and only once: it then drops its references, so that they
cannot be returned twice or out of order.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

CHANNELS = 3


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of a clip's buffers. Defaults (SL-1): 512, 1,080 frames, 1,080,000 samples: 45 s."""

    size: int = 512
    """Maximum pixels of either side."""
    frames: int = 1_080
    samples: int = 1_080_000

    @property
    def pixels(self) -> int:
        """Values of one picture, ``[3, size, size]``."""
        return CHANNELS * self.size**2

    @property
    def bytes(self) -> int:
        """Of the portrait (float32), the video (uint8) and the audio (float32)."""
        return 4 * self.pixels + self.frames * self.pixels + 4 * self.samples


@dataclass(frozen=True, slots=True)
class _Buffers:
    actor: torch.Tensor
    video: torch.Tensor
    audio: torch.Tensor

    def clear(self) -> None:
        """Overwrite all of the buffers with zeros."""
        for buffer in (self.actor, self.video, self.audio):
            buffer.zero_()


class Lease:
    """One clip's buffers until ``close``. Only ``close`` is thread-safe."""

    def __init__(self, buffers: _Buffers, give_back: Callable[[_Buffers], None]) -> None:
        self._buffers: _Buffers | None = buffers
        self._give_back = give_back
        self._lock = threading.Lock()

    def actor(self, size: int) -> torch.Tensor:
        """``[3, size, size]`` float32, 0 to 1."""
        return self._view(self._open().actor, CHANNELS, size, size)

    def video(self, frames: int, size: int) -> torch.Tensor:
        """``[frames, 3, size, size]`` uint8."""
        return self._view(self._open().video, frames, CHANNELS, size, size)

    def audio(self, samples: int) -> torch.Tensor:
        """``[samples]`` float32, -1 to 1."""
        return self._view(self._open().audio, samples)

    def clear(self) -> None:
        self._open().clear()

    def close(self) -> None:
        """Return the buffers. A second call does nothing."""
        with self._lock:
            buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._give_back(buffers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Buffers:
        if self._buffers is None:
            raise RuntimeError("the slot's buffers were given back")
        return self._buffers

    @staticmethod
    def _view(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
        count = math.prod(shape)
        if count > buffer.numel():
            raise ValueError(f"{list(shape)} does not fit into {buffer.numel()} elements")
        return buffer[:count].view(shape)


class BufferPool:
    """``slots`` sets of buffers. ``lease`` and returns are thread-safe."""

    def __init__(self, sizes: BufferSizes, slots: int, device: torch.device) -> None:
        self.sizes = sizes
        self.slots = slots
        self._lock = threading.Lock()
        self._free = [
            _Buffers(
                torch.zeros(sizes.pixels, dtype=torch.float32, device=device),
                torch.zeros(sizes.frames * sizes.pixels, dtype=torch.uint8, device=device),
                torch.zeros(sizes.samples, dtype=torch.float32, device=device),
            )
            for _ in range(slots)
        ]

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def bytes(self) -> int:
        return self.slots * self.sizes.bytes

    def lease(self) -> Lease | None:
        """Buffers for one clip; None while all are lent."""
        with self._lock:
            return Lease(self._free.pop(), self._return) if self._free else None

    def clear_buffers(self) -> None:
        """Overwrite free buffers with zeros, so that no data of a clip outlives it."""
        with self._lock:
            for buffers in self._free:
                buffers.clear()

    def _return(self, buffers: _Buffers) -> None:
        with self._lock:
            self._free.append(buffers)
