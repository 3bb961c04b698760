"""Runs compiled loops on torch's own threads.

Threads of our own would compete with torch's for the cores: after each parallel loop, OpenMP's spin
for some time and wait for the next one. So a compiled task runs like torch's own loops, by
``GOMP_parallel`` of the OpenMP that torch is linked with. Where there is none, tasks run on the
calling thread.

A *job* is an array of int64: how many of its parts are taken, how many there are, how many are
done, the address of their flags, the cycles that one took, then the task's data, mostly addresses.
Every thread takes parts until none is left (``native.next_part``), so that a long one does not
delay the others.

Flags, an int64 for each part, are for jobs that the same threads do one after the other
(``step_loops.in_turn``): none continues before all parts are done. A part that takes another thread
much longer than the others, since something else has its core, is then done again, with the same
result.
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
"""Parts of a job per thread: several, so that a thread held up by another process does fewer."""
WORTH_A_TEAM: Final = 65_536
"""Fewest values to use several threads for: fewer are done before another thread starts."""

Job = NDArray[np.int64]


_Counts = ctypes.c_int64 * FIRST_ARGUMENT


class TeamTask:
    """A compiled function of a job."""

    def __init__(self, function: Function, made: Any) -> None:
        self.function = function
        self._made = made  # owns the machine code
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address)
        self.address: int = made.address

    def run(self, job: Job, threads: int) -> None:
        """Run all parts of ``job`` on at most ``threads`` threads, including this one.

        Raises ``MemoryError`` when one could not be done.
        """
        job[TAKEN] = job[DONE] = 0
        self.run_at(job.ctypes.data, threads)

    def run_at(self, job_address: int, threads: int) -> None:
        """Like ``run``, for the address of a job of which no part is taken yet."""
        parallel = _parallel() if threads > 1 else None
        if parallel is None:
            self._call(job_address)
        else:
            parallel(self.address, job_address, threads, 0)
        counts = _Counts.from_address(job_address)
        # Lack of memory is the only failure of such code: numba prints it, and the call returns.
        if counts[DONE] != counts[PARTS]:
            raise MemoryError(f"{self.function.__name__}: no memory for a compiled loop")


def compiled_task(*constants: object) -> Callable[[Function], TeamTask]:
    """Make a ``TeamTask`` of a function of one pointer to int64, which is the job.

    Otherwise like ``compiled.compiled``: ``constants`` are all that the code depends on and does
    not contain, such as the layout of its arguments.
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
    """``GOMP_parallel(function, data, threads, flags)`` of torch's OpenMP, None without one."""
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
