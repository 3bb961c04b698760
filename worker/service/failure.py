"""Ends the process of a worker whose engine has failed, so that its supervisor starts another one.

A dead engine thread cannot be started anew: what it had in its device's memory is in no known
state. Without an end the worker would refuse everything from then on, and look alive.
"""

from collections.abc import Callable
from typing import Final

from worker.core import Clock, EngineService
from worker.log import service_log
from worker.service.drain import Drainer
from worker.service.emitter import Emitter

LAST_WORDS_S: Final = 0.5
"""What was sent last has so long to leave through Triton."""
MOST_S: Final = 5.0
"""Jobs have so long to be answered; a failed engine may not be able to end them all."""


class FailureWatch:
    """``advance`` runs on the emitter's thread, once per cycle."""

    def __init__(
        self,
        engine: Callable[[], EngineService],
        emitter: Emitter,
        drainer: Drainer,
        clock: Clock,
        die: Callable[[], None],
    ) -> None:
        """``engine`` says which one it is now; ``die`` ends the process."""
        self._engine = engine
        self._emitter = emitter
        self._drainer = drainer
        self._clock = clock
        self._die = die
        self._noticed_at: float | None = None
        self._is_over = False

    def advance(self) -> None:
        """Look whether the engine has failed; drain, then end the process."""
        if self._is_over:
            return
        now = self._clock()
        if self._noticed_at is None:
            # A swap puts another engine in its place, or ends the process itself.
            if self._engine().has_failed and not self._drainer.is_swapping:
                self._noticed_at = now
                self._drainer.begin(0.0, None)
            return
        left = len(self._emitter.job_replies)
        waited_s = now - self._noticed_at
        if waited_s >= (MOST_S if left else LAST_WORDS_S):
            self._is_over = True
            service_log.critical(
                "the engine has failed: ending the process, %d jobs unanswered; its supervisor"
                " starts it again",
                left,
            )
            self._die()
