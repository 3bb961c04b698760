"""Copies host arrays to the device without waiting for it."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED: Final = 4
"""int32 values per 16 bytes, the alignment that kernels want of their pointers."""


def pack_int32(
    parts: Sequence[NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Flat int32 copies of ``parts`` on ``device``, in one transfer, each aligned to 16 bytes.

    Kernels are compiled once for aligned and once for unaligned pointers: this avoids the second.
    """
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + -(-part.size // _ALIGNED) * _ALIGNED)
    packed = np.zeros(starts[-1], np.int32)
    for part, start in zip(parts, starts, strict=False):
        packed[start : start + part.size] = part.reshape(-1)
    there = to_device(packed, device)
    return tuple(
        there[start : start + part.size] for part, start in zip(parts, starts, strict=False)
    )


def staged(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """``array`` in memory from which ``device`` can copy it without a wait.

    Pinned, since a copy from pageable memory may wait for the stream. torch's pinned allocator
    hands a freed block out again only when the copies queued from it are done.
    """
    tensor: torch.Tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on ``device``; on CUDA it is queued behind what the stream does."""
    return staged(array, device).to(device, non_blocking=True)
