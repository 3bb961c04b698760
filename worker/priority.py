"""Threads that stand back for those that answer requests."""

import os
import threading
from contextlib import suppress


def lower_priority(by: int) -> None:
    """Of this thread, and of those that it starts (as torch's for one operation): ``by`` steps of
    niceness below the process's own, 19 at most. Never raised."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a container may forbid it
        nice = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + by)
        if nice > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
