"""Lowers the priority of threads, in favour of those that answer requests."""

import os
import threading
from contextlib import suppress


def lower_priority(by: int) -> None:
    """Set this thread's niceness, and that of threads that it starts (such as torch's for one
    operation), to ``by`` more than the process's, 19 at most. Never raises the priority."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a container may forbid it
        nice = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + by)
        if nice > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
