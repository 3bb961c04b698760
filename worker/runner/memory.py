"""What memory the worker has taken, and what it may take (WK-4). No torch unless on CUDA.

Weights and KV pool are allocated once, at load; what comes and goes after that are activations,
tables and caches. The limits hold at load, pool included, and are looked at between steps.
"""

import ctypes
import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from worker.errors import MemoryLimitExceeded
from worker.log import engine_log
from worker.runner import cgroup

GIB: Final = 2**30
_STEP_SHARE: Final = 0.1
"""Of what a limit leaves beside the weights, kept for activations when the pool is sized."""
_STATM: Final = Path("/proc/self/statm")
_MEMINFO: Final = Path("/proc/meminfo")


class MemoryMeter(Protocol):
    """The memory that limits are about: the GPU's, or the process's own on the CPU."""

    def used_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What others have left of it."""

    def drop_caches(self) -> None:
        """Give back what is held only to be used again."""


class ProcessMemory:
    """Memory of this process that the system could not take back: without mapped files."""

    def used_bytes(self) -> int:
        try:
            _, resident, shared, *_ = _STATM.read_text("ascii").split()
        except (OSError, ValueError):  # no Linux
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        """Of the machine, or of what a container's limit leaves."""
        limited = cgroup.free_bytes()
        free = 2**63 if limited is None else limited
        try:
            for line in _MEMINFO.read_text("ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return min(free, int(line.split()[1]) * 1024)
        except (OSError, ValueError):
            pass
        return free

    def drop_caches(self) -> None:
        gc.collect()
        with suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


class CudaMemory:
    """What torch's allocator holds of a GPU, caches included."""

    def __init__(self, index: int) -> None:
        self._index = index

    def used_bytes(self) -> int:
        import torch

        return torch.cuda.memory_reserved(self._index)

    def free_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info(self._index)[0]

    def drop_caches(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """In bytes, 0 for none."""

    soft_bytes: int = 0
    hard_bytes: int = 0

    @classmethod
    def from_gib(cls, soft: float, hard: float) -> "MemoryLimits":
        """Raises ``ValueError`` for a soft limit beyond the hard one."""
        if hard and soft > hard:
            raise ValueError(
                f"memory_soft_gib ({soft:g}) is beyond memory_hard_gib ({hard:g}):"
                " it would never warn; lower it"
            )
        return cls(round(soft * GIB), round(hard * GIB))


def cpu_pool_bytes(free: int, instances: int, context_bytes: int) -> int:
    """For the KV pool of one of ``instances`` workers, of ``free`` bytes that all of them see.

    A quarter, or what a text of the whole context takes up to half; less each where they are more
    than two. A pool takes memory only as it fills, so that the next worker to start still sees it
    free: two that know nothing of each other fit.
    """
    part = free // max(2, instances)
    return max(part // 2, min(part, context_bytes))


class MemoryGuard:
    """Holds a meter against limits: the soft one warns once, the hard one raises."""

    def __init__(self, meter: MemoryMeter, limits: MemoryLimits) -> None:
        self.meter = meter
        self._limits = limits
        self._has_warned = False

    def pool_bytes(self) -> int | None:
        """The largest KV pool that the hard limit allows beside what is used; None: any."""
        hard = self._limits.hard_bytes
        if not hard:
            return None
        return max(0, int((hard - self.meter.used_bytes()) * (1 - _STEP_SHARE)))

    def check(self, ahead_bytes: int = 0) -> None:
        """``ahead_bytes`` are allocated but may not count as used yet.

        Raises ``MemoryLimitExceeded`` if dropping caches does not help.
        """
        limits = self._limits
        if not (limits.soft_bytes or limits.hard_bytes):
            return
        used = self.meter.used_bytes() + ahead_bytes
        if limits.hard_bytes and used > limits.hard_bytes:
            self.meter.drop_caches()
            used = self.meter.used_bytes() + ahead_bytes
            if used > limits.hard_bytes:
                raise MemoryLimitExceeded(
                    f"memory hard limit exceeded: {used / GIB:.2f} GiB of"
                    f" {limits.hard_bytes / GIB:.2f} in use; raise TIDEGATE_WORKER_MEMORY_HARD_GIB,"
                    " or lower TIDEGATE_WORKER_KV_BLOCKS or TIDEGATE_WORKER_MAX_STEP_TOKENS"
                )
        if limits.soft_bytes and used > limits.soft_bytes and not self._has_warned:
            self._has_warned = True
            engine_log.warning(
                "memory soft limit exceeded: %.2f GiB of %.2f in use; logged once",
                used / GIB,
                limits.soft_bytes / GIB,
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Of Python, of torch on a GPU, or of torch's allocator on the CPU."""
    if isinstance(error, MemoryError):
        return True
    # By name, so that engines without torch need not import it.
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
