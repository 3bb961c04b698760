"""Ctrl-C while a command's modules are imported."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C ends the process at once, since a module that is cut short may fail in its own way:
    numpy turns ``KeyboardInterrupt`` into an ``ImportError``."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored: so it stays
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
