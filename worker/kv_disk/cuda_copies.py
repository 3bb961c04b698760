"""``KVMemory`` over a tensor ``[layers, blocks, block_tokens, 2 * kv_heads, head_dim]``."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch

from worker.kv_disk.base import HostMemory, KVMemory
from worker.kv_disk.block_file import BlockFormat, Bytes
from worker.pinned import pinned

_DTYPE_NAMES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def memory_of(pool: torch.Tensor) -> KVMemory:
    """The ``KVMemory`` for ``pool``, according to its device."""
    shape = (pool.shape[0], *pool.shape[2:])
    block_bytes = pool[:, 0].numel() * pool.element_size()
    block_format = BlockFormat(_DTYPE_NAMES[pool.dtype], shape, block_bytes)
    if pool.device.type == "cuda":
        return CudaPool(pool, block_format)
    flat = pool.detach().flatten(2).view(torch.uint8)  # shares the pool's memory
    return HostMemory(flat.numpy(), block_format)


class CudaPool:
    """A pool on a GPU, with pinned staging memory and its own streams besides the engine's. Blocks
    copied out were computed by a finished step, and blocks copied in are complete before any step
    uses them, so no stream has to wait for another.
    """

    def __init__(self, pool: torch.Tensor, block_format: BlockFormat) -> None:
        self._bytes = pool.flatten(2).view(torch.uint8)  # [layers, blocks, bytes]
        self.format = block_format
        self._out = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def staging(self, blocks: int) -> Bytes:
        return pinned((blocks, self.format.block_bytes))

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._out):
            gathered = self._bytes[:, self._indices(blocks)].transpose(0, 1).contiguous()
            host = torch.from_numpy(staging[: len(blocks)])
            host.copy_(gathered.flatten(1), non_blocking=True)
            self._out.synchronize()

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._in):
            host = torch.from_numpy(staging[: len(blocks)])
            arrived = host.to(self._bytes.device, non_blocking=True)
            by_layer = arrived.view(len(blocks), len(self._bytes), -1).transpose(0, 1)
            self._bytes.index_copy_(1, self._indices(blocks), by_layer)
            self._in.synchronize()

    def clear(self, blocks: Sequence[int]) -> None:
        # A lost device computes nothing, so its errors do not matter here.
        with suppress(RuntimeError), torch.inference_mode(), torch.cuda.device(self._bytes.device):
            self._bytes.index_fill_(1, self._indices(blocks), 0)
            # The next user of the blocks may write to them from another stream.
            torch.cuda.current_stream().synchronize()

    def _indices(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._bytes.device)
