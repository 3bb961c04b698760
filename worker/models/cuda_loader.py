"""Loads weights onto a GPU: several threads fill pinned buffers, and a side stream empties them.

::

    file ──preadv──▶ pinned buffer ──copy, side stream──▶ its place in the fused tensor
                      ▲ free again once the copy's event has passed

Reading, copying and converting overlap; the host holds only the ring of buffers.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import torch
from torch import Tensor

from worker.models.checkpoint import Checkpoint
from worker.models.parameters import Parameter, StoredPart, stacked_shape

_BUFFER_BYTES: Final = 32 * 2**20
_READERS: Final = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one file and their target: the elements from ``first`` on in a flat fused tensor."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    out: Tensor
    first: int


def load_on_cuda(
    checkpoint: Checkpoint,
    parameters: Mapping[str, Parameter],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[tuple[StoredPart, ...], Tensor]:
    """Load every stack of parts as one tensor on ``device``; load shared stacks only once."""
    stacks = {parts for p in parameters.values() for parts in (p.parts, p.bias) if parts}
    fused = {
        parts: torch.empty(stacked_shape(parts), dtype=dtype, device=device) for parts in stacks
    }
    readers = min(_READERS, os.cpu_count() or 1)
    ring = _Ring(2 * readers, device)
    # Work that was queued earlier may still use the tensors' memory.
    ring.stream.wait_stream(torch.cuda.current_stream(device))
    with ThreadPoolExecutor(readers, "tidegate-load") as pool:
        chunks = [
            chunk
            for parts, out in fused.items()
            for chunk in cut(checkpoint, parts, out, _BUFFER_BYTES)
        ]
        chunks.sort(key=lambda chunk: (chunk.file, chunk.offset))
        for _ in pool.map(partial(ring.carry, checkpoint), chunks):
            pass
    torch.cuda.current_stream(device).wait_stream(ring.stream)
    ring.stream.synchronize()
    return fused


def cut(
    checkpoint: Checkpoint, parts: tuple[StoredPart, ...], out: Tensor, most: int
) -> Iterator[Chunk]:
    """Split into reads of at most ``most`` bytes that fill ``out``, the stack of ``parts``."""
    flat, first = out.view(-1), 0
    for part in parts:
        stored = checkpoint[part]
        step = most // stored.dtype.itemsize * stored.dtype.itemsize
        for start in range(0, stored.nbytes, step):
            nbytes = min(step, stored.nbytes - start)
            yield Chunk(stored.file, stored.offset + start, nbytes, stored.dtype, flat, first)
            first += nbytes // stored.dtype.itemsize


class _Ring:
    """Pinned buffers, each with the event of the last copy from it."""

    def __init__(self, buffers: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
        for _ in range(buffers):
            buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free.put((buffer, event))

    @torch.inference_mode()  # inference mode is per thread
    def carry(self, checkpoint: Checkpoint, chunk: Chunk) -> None:
        """Read one chunk and queue its copy."""
        buffer, copied = self._free.get()
        try:
            copied.synchronize()
            held = buffer[: chunk.nbytes]
            checkpoint.read_bytes(chunk.file, chunk.offset, held)
            values = held.view(chunk.dtype)
            with torch.cuda.stream(self.stream):
                place = chunk.out[chunk.first : chunk.first + len(values)]
                if chunk.dtype != chunk.out.dtype:
                    values = values.to(self._device, non_blocking=True)
                place.copy_(values, non_blocking=True)
                copied.record()
        finally:
            self._free.put((buffer, copied))
