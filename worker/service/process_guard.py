"""Ends a process in which none of our threads gets to run any more.

``FailureWatch`` is Python, and needs the interpreter's lock: native code that never returns and
never releases that lock stops it too. ``faulthandler`` waits on a thread that needs no lock, and
writes every thread's stack before it ends the process.
"""

import faulthandler
from typing import Final

from worker.core import Clock

STDERR: Final = 2
RENEWALS: Final = 4
"""Renewals of the timer in each ``timeout_s``."""


class ProcessGuard:
    """Ends the process (status 1) unless ``advance`` is called at least every ``timeout_s``.

    A process has only one such timer, which the test runner uses in tests.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """``timeout_s`` 0: the process is never ended. One that is stopped for that long ends too,
        once it goes on: everybody has given it up by then."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._due_at = clock()

    def advance(self) -> None:
        """Renew the timer, if it is time to."""
        now = self._clock()
        if self._timeout_s and now >= self._due_at:
            self._due_at = now + self._timeout_s / RENEWALS
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=STDERR)

    def close(self) -> None:
        """Stop the timer: the process may stand still from here on. Idempotent."""
        self._timeout_s = 0.0
        faulthandler.cancel_dump_traceback_later()
