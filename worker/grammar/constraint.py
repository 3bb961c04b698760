"""How far the text of one job has come in its grammar."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from numpy.typing import NDArray

from worker.protocol.grammar_source import problem

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher


LONG_MASK_S: Final = 0.01
"""Of CPU. A mask takes some hundred microseconds, and what the library's limits allow ten times
this."""
MOST_OVERRUN_S: Final = 0.5
"""What all masks of one text may take beyond that: others' rows wait for each of them."""


class Constraint:
    """What a job's text must match. ``error`` says, once it ``is_ready`` or in a later step, why it
    cannot be: its job is to end.

    Threads: made ready by the compiler's, then used by one at a time.
    """

    __slots__ = (
        "_consumed",
        "_is_complete",
        "_lock",
        "_matcher",
        "_on_ready",
        "_overrun_s",
        "error",
        "is_dropped",
        "is_ready",
    )

    def __init__(self) -> None:
        self.is_ready = False
        self.is_dropped = False
        """Nobody waits for it any more."""
        self.error = ""
        self._matcher: LLMatcher | None = None
        self._consumed = 0
        self._overrun_s = 0.0
        self._is_complete = False
        """Nothing may follow but the end, which may have come already."""
        self._on_ready: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def when_ready(self, call: Callable[[], None]) -> None:
        """``call``, on any thread, once it is compiled or has failed; at once if it is already."""
        with self._lock:
            if not self.is_ready:
                self._on_ready = call
                return
        call()

    def drop(self) -> None:
        """The job is over."""
        self.is_dropped = True
        if self.is_ready:
            self._matcher = None

    def resolve(self, matcher: "LLMatcher | None", error: str = "") -> None:
        """It is compiled, or ``error`` says why not."""
        with self._lock:
            self._matcher, self.error = matcher, error
            self.is_ready = True
            call = self._on_ready
        if call is not None:
            call()

    def advance(self, generated: Sequence[int]) -> None:
        """Take in what the job has ``generated``, less what was taken in before."""
        matcher, known = self._matcher, self._consumed
        if matcher is None or self.error or len(generated) == known:
            return
        if len(generated) < known:  # a step was taken back
            matcher.rollback(known - len(generated))
        elif self._is_complete:
            return
        elif not matcher.consume_tokens(list(generated[known:])):
            self.error = problem(matcher.get_error() or "the text has left it")
        self._consumed = len(generated)
        self._is_complete = not self.error and matcher.is_stopped()

    def fill(self, words: "NDArray[np.uint32]", end: "NDArray[np.uint32]") -> None:
        """Which tokens may come next, a bit for each, into ``words`` [vocabulary / 32]; ``end`` has
        those of the end tokens."""
        matcher = self._matcher
        if matcher is None or self.error:
            words[:] = 0xFFFFFFFF  # whatever is drawn is not used
            return
        if self._is_complete:
            words[:] = end
            return
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._overrun_s += max(0.0, time.thread_time() - began - LONG_MASK_S)
        if matcher.is_error():
            self.error = problem(matcher.get_error())
        elif self._overrun_s > MOST_OVERRUN_S:
            self.error = "the grammar takes too much work for each token: make it less ambiguous"
        if self.error:
            words[:] = 0xFFFFFFFF
