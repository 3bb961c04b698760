"""Runs compiled loops on torch's own threads.

Our own threads would compete with torch's for the cores: after each parallel loop, OpenMP's threads
spin for some time and wait for the next one. So a compiled task runs like torch's own loops,
through ``GOMP_parallel`` of the OpenMP that torch is linked with. Without it, tasks run on the
calling thread.

A *job* is an array of int64: the number of parts taken, the number of parts, the number done, the
address of their flags, the cycles that one part took, then the task's data, mostly addresses. Every
thread takes parts until none is left (``native.parts_of``), so that a long part does not delay the
others.

Flags, one int64 per part, are for jobs that the same threads run one after another
(``step_loops.in_turn``): no thread continues before all parts are done. If a part takes another
thread much longer than the other parts, because another process holds its core, it is done again,
with the same result.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from worker.cpu_kernels.compiled import Function, compiled_once
from worker.log import model_log

TAKEN: Final = 0
PARTS: Final = 1
DONE: Final = 2
FLAGS: Final = 3
TOOK: Final = 4
FIRST_ARGUMENT: Final = 5
PARTS_PER_THREAD: Final = 8
"""Parts of a job per thread: several, so that a thread delayed by another process does fewer."""
WORTH_A_TEAM: Final = 65_536
"""Minimum values to use several threads: fewer finish before another thread starts."""

Job = NDArray[np.int64]


_Counts = ctypes.c_int64 * FIRST_ARGUMENT


class TeamTask:
    """A compiled function of a job."""

    def __init__(self, function: Function, made: Any) -> None:
        self.function = function
        self._made = made  # keeps the machine code alive
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address)
        self.address: int = made.address

    def run(self, job: Job, threads: int) -> None:
        """Run all parts of ``job`` on at most ``threads`` threads, including this one.

        Raises ``MemoryError`` if a part lacks memory.
        """
        job[TAKEN] = job[DONE] = 0
        self.run_at(job.ctypes.data, threads)

    def run_at(self, job_address: int, threads: int) -> None:
        """Like ``run``, for the address of a job none of whose parts is taken yet."""
        parallel = _parallel() if threads > 1 else None
        if parallel is None:
            self._call(job_address)
        else:
            parallel(self.address, job_address, threads, 0)
        counts = _Counts.from_address(job_address)
        # Lack of memory is this code's only failure: numba prints it, and the call returns.
        if counts[DONE] != counts[PARTS]:
            raise MemoryError(f"{self.function.__name__}: no memory for a compiled loop")


def compiled_task(*constants: object) -> Callable[[Function], TeamTask]:
    """Make a ``TeamTask`` from a function of one pointer to int64: the job.

    Otherwise like ``compiled.compiled``: ``constants`` are everything that the code depends on but
    does not contain, such as the layout of its arguments.
    """

    def compile_it(function: Function) -> TeamTask:
        from worker.cpu_kernels.native import cfunc, types

        layout = TAKEN, PARTS, DONE, FLAGS, TOOK, FIRST_ARGUMENT
        signature = types.void(types.CPointer(types.int64))
        return TeamTask(function, compiled_once(cfunc, signature, function, (*constants, layout)))

    return compile_it


def has_team() -> bool:
    """Whether tasks run on more than one thread."""
    return _parallel() is not None


@cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel(function, data, threads, flags)`` of torch's OpenMP; None if it has none."""
    try:
        libraries = Path(torch.__file__).parent / "lib"
        found = ctypes.CDLL(str(next(libraries.glob("libtorch_cpu.*")))).GOMP_parallel
    except (OSError, AttributeError, StopIteration) as error:
        model_log.warning("torch's OpenMP is out of reach (%s): loops run on one thread", error)
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    found.restype = None
    parallel: Callable[..., None] = found
    return parallel
