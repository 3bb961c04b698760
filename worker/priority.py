"""Lowers the priority of threads, in favor of the threads that answer requests."""

import os
import threading
from contextlib import suppress


def lower_priority(by: int) -> None:
    """Set the niceness of this thread and of threads that it starts (such as torch's for one
    operation) to the process's plus ``by``, at most 19. Never raises the priority."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a container may forbid it
        nice = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + by)
        if nice > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
