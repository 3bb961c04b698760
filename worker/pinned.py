"""Reused page-locked host memory, and copies through it.

A GPU copies from and to page-locked (pinned) memory without blocking the host. This memory is never
freed, for two reasons. Locking pages takes a hundred microseconds, which every step would pay. And
torch's own allocator calls the driver when it frees such memory: on a lost device that call throws
where no exception is allowed, and ends the process before the loss is reported. A buffer is reused
once its tensor is gone and its last copy is done. All copies of a process are for one GPU. Any
thread may call this module.
"""

import ctypes
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_MIN_BYTES: Final = 512
_RESERVED_BITS: Final = 20
_RESERVED_EACH: Final = 4
"""``reserve`` makes this many buffers of each size below 2 ** 20 bytes: 4 MiB in total."""
_ALIGNED: Final = 4
"""int32 values per 16 bytes, the pointer alignment that kernels need."""


class _Buffer:
    """``memory`` [bytes] uint8, page-locked; ``copied`` marks the copy queued last."""

    __slots__ = ("copied", "host", "memory")

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(False):  # its next user may be outside that mode
            self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.host: NDArray[np.uint8] = self.memory.numpy()
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # One extra reference, so that even the interpreter's shutdown does not free it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))


_free: Final[dict[int, deque[_Buffer]]] = defaultdict(deque)
"""Buffers by size in bytes, a power of two; the one returned first comes first."""


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return a copy of ``array`` on ``device``, queued after the current stream's work."""
    if device.type != "cuda":
        return torch.from_numpy(array).to(device)
    buffer, source = _filled(array)
    there = source.to(device, non_blocking=True)
    _copied(buffer)
    return there


def upload_to(target: torch.Tensor, array: NDArray[np.generic]) -> None:
    """Copy ``array`` into ``target`` of the same shape, queued after the current stream's work."""
    if target.device.type != "cuda":
        target.copy_(torch.from_numpy(array))
        return
    buffer, source = _filled(array)
    target.copy_(source, non_blocking=True)
    _copied(buffer)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying ``tensor`` to host memory; read it after an event. On the CPU, clone it.

    Views of the result do not keep its memory alive: keep the result too.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    nbytes = tensor.numel() * tensor.element_size()
    buffer = _take(nbytes)
    there = buffer.memory[:nbytes].view(tensor.dtype).view(tensor.shape)
    there.copy_(tensor, non_blocking=True)
    buffer.copied.record()
    _give_back_after(there, buffer)
    return there


def pinned(shape: Sequence[int]) -> NDArray[np.uint8]:
    """Return an array of page-locked bytes, which are reused once its last view is gone.

    Copies from and to it must have finished by then.
    """
    nbytes = int(np.prod(shape))
    buffer = _take(nbytes)
    tensor = buffer.memory[:nbytes]
    _give_back_after(tensor, buffer)
    array: NDArray[np.uint8] = tensor.numpy()  # keeps the tensor alive
    return array.reshape(shape)


def pack_int32(
    parts: Sequence[NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Make flat int32 copies of ``parts`` on ``device`` in one transfer, each aligned to 16 bytes.

    Kernels are compiled once for aligned and once for unaligned pointers: this avoids the latter.
    """
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + -(-part.size // _ALIGNED) * _ALIGNED)
    packed = np.zeros(starts[-1], np.int32)
    for part, start in zip(parts, starts, strict=False):
        packed[start : start + part.size] = part.reshape(-1)
    there = upload(packed, device)
    return tuple(
        there[start : start + part.size] for part, start in zip(parts, starts, strict=False)
    )


def reserve() -> None:
    """Lock pages for the steps' copies in advance, because locking takes milliseconds."""
    for power in range(_MIN_BYTES.bit_length() - 1, _RESERVED_BITS):
        _free[1 << power].extend(_Buffer(1 << power) for _ in range(_RESERVED_EACH))


def _filled(array: NDArray[np.generic]) -> tuple[_Buffer, torch.Tensor]:
    buffer = _take(array.nbytes)
    host = buffer.host[: array.nbytes].view(array.dtype).reshape(array.shape)
    host[...] = array
    return buffer, torch.from_numpy(host)


def _take(nbytes: int) -> _Buffer:
    size = max(_MIN_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
    free = _free[size]
    try:
        buffer = free.popleft()
    except IndexError:
        return _Buffer(size)
    if buffer.copied.query():  # type: ignore[no-untyped-call]
        return buffer
    free.append(buffer)
    return _Buffer(size)


def _copied(buffer: _Buffer) -> None:
    buffer.copied.record()
    _free[buffer.memory.numel()].append(buffer)


def _give_back_after(tensor: torch.Tensor, buffer: _Buffer) -> None:
    """Reuse ``buffer`` once ``tensor`` is gone."""
    given = weakref.finalize(tensor, _free[buffer.memory.numel()].append, buffer)
    given.atexit = False
