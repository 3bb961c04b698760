"""A grammar and the progress of one job's text in it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from numpy.typing import NDArray

from protocol.grammar_source import problem
from worker.grammar.closing import Closing

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher


LONG_MASK_S: Final = 0.01
"""CPU seconds after which a mask counts as slow. A mask usually takes a few hundred microseconds;
the library's limits allow ten times ``LONG_MASK_S``."""
MAX_OVERRUN_S: Final = 0.5
"""CPU seconds beyond ``LONG_MASK_S`` that all masks of one text may take in total, because other
rows wait for each mask."""


class Constraint:
    """The grammar that a job's text must match, if any. Once it ``is_ready``, or in a later step,
    ``error`` may say why the text cannot match it; the job must then end.

    A compiler thread makes it ready; from then on, one thread at a time uses it.
    """

    def __init__(self, closing: Closing | None = None) -> None:
        """``closing`` brings the text to a whole end in time; with None, the text may be cut."""
        self._closing = closing
        self.is_ready = False
        self.is_dropped = False
        """Whether the job is over and no longer needs its grammar."""
        self.error = ""
        self._matcher: LLMatcher | None = None
        self._consumed = 0
        self._overrun_s = 0.0
        self._is_complete = False
        """Whether the text is complete: only its end token may follow, if it has not come yet."""
        self._on_ready: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def has_closed(self) -> bool:
        """Whether the text was made to end because its deadline was near."""
        return self._closing is not None and self._closing.has_begun

    def is_cut_early(self, early_s: float) -> None:
        """Note that the engine cuts an unfinished text up to ``early_s`` seconds before its
        deadline."""
        if self._closing is not None:
            self._closing.early_s = early_s

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call``, on any thread, once this is compiled or has failed."""
        with self._lock:
            if not self.is_ready:
                self._on_ready = call
                return
        call()

    def drop(self) -> None:
        """Note that the job is over."""
        self.is_dropped = True
        if self.is_ready:
            self._matcher = None

    def resolve(self, matcher: "LLMatcher | None", error: str = "") -> None:
        """Make it ready: with a ``matcher``, or an ``error`` that says why not."""
        with self._lock:
            self._matcher, self.error = matcher, error
            self.is_ready = True
            call = self._on_ready
        if call is not None:
            call()

    def advance(self, generated: Sequence[int]) -> None:
        """Follow the job's text to the end of ``generated`` (all of its tokens), or back to it."""
        if self._closing is not None:
            self._closing.follow(generated)
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
        """Set a bit in ``words`` [vocabulary / 32] for each token that may come next; ``end`` has
        the bits of the end tokens."""
        self._fill(words, end)
        if self._closing is not None and not (self.error or self._is_complete):
            self._closing.restrict(words, end, self._matcher)

    def _fill(self, words: "NDArray[np.uint32]", end: "NDArray[np.uint32]") -> None:
        matcher = self._matcher
        if matcher is None or self.error:
            words[:] = 0xFFFFFFFF  # the drawn token is not used
            return
        if self._is_complete:
            words[:] = end
            return
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._overrun_s += max(0.0, time.thread_time() - began - LONG_MASK_S)
        if matcher.is_error():
            self.error = problem(matcher.get_error())
        elif self._overrun_s > MAX_OVERRUN_S:
            self.error = "the grammar takes too much work for each token: make it less ambiguous"
        if self.error:
            words[:] = 0xFFFFFFFF
