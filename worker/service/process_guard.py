"""Ends a process in which no thread of ours gets to run any more.

``FailureWatch`` is Python, and needs the interpreter's lock: native code that never returns and
never gives that lock up stops it too. ``faulthandler`` waits on a thread that needs no lock, and
writes down where every thread is before it ends the process.
"""

import faulthandler
from typing import Final

from worker.core import Clock

STDERR: Final = 2
RENEWALS: Final = 4
"""In each ``timeout_s``."""


class ProcessGuard:
    """``advance`` is to be called at least every ``timeout_s``; else the process ends (status 1).

    There is one timer in a process, which is that of the test runner in tests.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """``timeout_s`` 0: nothing is ended. A process that is stopped for so long ends as well,
        once it goes on: everybody has given it up by then."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._due_at = clock()

    def advance(self) -> None:
        """There is life in it."""
        now = self._clock()
        if self._timeout_s and now >= self._due_at:
            self._due_at = now + self._timeout_s / RENEWALS
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=STDERR)

    def close(self) -> None:
        """It may stand still from here on. Idempotent."""
        self._timeout_s = 0.0
        faulthandler.cancel_dump_traceback_later()
