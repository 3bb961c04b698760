"""Ctrl-C while a command's modules are imported."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def importing() -> Iterator[None]:
    """Have Ctrl-C end the process at once, since a module that is cut short may fail in its own
    way: numpy turns ``KeyboardInterrupt`` into an ``ImportError``."""
    is_main = threading.current_thread() is threading.main_thread()  # another hears no signals
    # ignored: so it stays
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
