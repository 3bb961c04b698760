"""Measures and limits the worker's memory (WK-4). Needs torch only on CUDA.

Weights and KV pool are allocated once, at load; after that only activations, tables and caches
change. The limits apply at load, including the pool, and are checked between steps.
"""

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from worker.free_memory import memory_free
from worker.log import engine_log
from worker.memory import LimitedMemory, MemoryGuard, MemoryLimits

if TYPE_CHECKING:
    from worker.models.config import ModelConfig

_STEP_SHARE: Final = 0.1
"""Share of a limit's remainder after the weights that is reserved for activations."""
_SPARE_SHARE: Final = 0.03
_MIN_SPARE_BYTES: Final = 512 * 2**20
"""Minimum share of a GPU's free memory, and minimum bytes, that the KV pool leaves unused after the
largest step. Recordings of up to 64 rows of an 8B model took 86 MiB (H100)."""
_ADVICE: Final = (
    "raise TIDEGATE_WORKER__MEMORY__HARD_GIB, or lower TIDEGATE_WORKER__KV__BLOCKS or"
    " TIDEGATE_WORKER__MAX_STEP_TOKENS"
)
_STATM: Final = Path("/proc/self/statm")


class MemoryMeter(LimitedMemory, Protocol):
    """A meter of the GPU's memory or, on the CPU, of the process's memory."""

    def free_bytes(self) -> int:
        """Free bytes of that memory."""


class ProcessMemory:
    """Memory of this process that the system cannot reclaim, which excludes mapped files."""

    def used_bytes(self) -> int:
        try:
            _, resident, shared, *_ = _STATM.read_text("ascii").split()
        except (OSError, ValueError):  # not Linux
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        """Free bytes of the machine, or the bytes left under a container's limit if fewer."""
        free = memory_free()
        return 2**63 if free is None else free

    def drop_caches(self) -> None:
        gc.collect()
        with suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


class CudaMemory:
    """GPU memory that torch's allocator holds, including caches."""

    def __init__(self, index: int) -> None:
        import torch

        self._cuda, self._index = torch.cuda, index

    def used_bytes(self) -> int:
        return self._cuda.memory_reserved(self._index)

    def free_bytes(self) -> int:
        return self._cuda.mem_get_info(self._index)[0]

    def drop_caches(self) -> None:
        gc.collect()
        self._cuda.empty_cache()


def block_bytes(config: "ModelConfig", block_tokens: int, number_bytes: int) -> int:
    """Bytes of one KV block: keys and values of all layers, ``number_bytes`` per number."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return block_tokens * per_token * number_bytes


def cuda_pool_bytes(free: int, step_bytes: int) -> int:
    """Bytes for the KV pool on a GPU with ``free`` bytes after loading: ``free`` minus
    ``step_bytes`` for the largest step, minus a share for recordings, libraries and
    fragmentation."""
    return max(0, free - step_bytes - max(_MIN_SPARE_BYTES, int(_SPARE_SHARE * free)))


def cpu_pool_bytes(free: int, instances: int, context_bytes: int) -> int:
    """Bytes for the KV pool of one of ``instances`` workers, if all of them see ``free`` bytes.

    A quarter of ``free``, or the bytes of a text of the whole context up to half; each gets less if
    there are more than two. A pool takes memory only as it fills, so the next worker to start still
    sees that memory as free: two workers that do not know of each other fit.
    """
    part = free // max(2, instances)
    return max(part // 2, min(part, context_bytes))


def text_guard(meter: MemoryMeter, limits: MemoryLimits) -> MemoryGuard:
    """The memory guard of the text engine."""
    return MemoryGuard(meter, limits, _ADVICE, engine_log)


def pool_bytes(guard: MemoryGuard) -> int | None:
    """Bytes of the largest KV pool that the hard limit allows besides the used memory, or None."""
    hard = guard.limits.hard_bytes
    if not hard:
        return None
    return max(0, int((hard - guard.meter.used_bytes()) * (1 - _STEP_SHARE)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that Python or torch, on a GPU or the CPU, ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    # Compared by name, so that engines without torch do not import it.
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
