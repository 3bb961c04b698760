"""CPU time of a process, read from outside of it."""

import time

_SCHED = 2


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU that ``pid`` has used, user and system, threads that ended included.

    Its CPU-time clock, as ``clock_getcpuclockid(3)`` names it: exact, where ``/proc/PID/stat``
    counts ticks of 10 ms. Raises ``ProcessLookupError`` when the process is gone.
    """
    try:
        return time.clock_gettime((~pid << 3) | _SCHED)
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error
