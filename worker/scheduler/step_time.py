"""Estimates step times, measured outside the device."""

import math
from collections import deque
from typing import Final

from protocol import CERTAIN_AFTER_STEPS, CERTAIN_SHARE

_SMOOTHING: Final = 1 / 16
"""Weight of the latest step in the moving averages."""
BOUND_STEPS: Final = 8
"""Number of steps that are averaged: a step that is read late makes the next look short."""
_WORST_FADES: Final = 1 / 512
"""Share by which the worst excess decays with each step: to a third in 512, about ten seconds."""
_SPLIT_SPREAD: Final = 0.25
"""Least spread of the latest chunks' sizes, as a share of their mean, from which the fixed part of
a chunk's time can be separated."""
_MAX_EXCESS: Final = 4.0
"""Largest excess that counts, in mean steps: a larger one is an accident and no reason to end jobs
early or to use smaller chunks."""


class StepTime:
    """Running estimates of step times, in seconds unless the name says otherwise.

    Two bounds matter more than the mean. A job is dropped only if even the shortest measured step
    times would be too long. A job that ends cleanly before its deadline leaves room for a *slow*
    step.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        """Moving average over steps that decoded."""
        self.typical_tokens = 0.0
        """Moving average of answer lengths in tokens; 0 until an answer has ended."""
        self.plain_step_s = 0.0
        """Moving average over steps that only decoded; 0 until the first one."""
        self.least_token_s = 0.0
        """Least time of a token in any batch; 0 until known.

        The least time per token over ``BOUND_STEPS`` consecutive steps, minus a margin. Larger
        batches are slower and do not show it: it is valid after enough steps with one row, if no
        later step beat the certain bound.
        """
        self._fastest_token_s = math.inf
        """Least measured time per token; it never grows."""
        self._counted_from_s = math.inf
        """The least time per token when the count of single-row steps began."""
        self._latest: deque[tuple[float, int]] = deque(maxlen=BOUND_STEPS)
        """Seconds and tokens per row of the latest decoding steps."""
        self._lone_steps = 0
        """Number of single-row steps since the bound was last beaten."""
        self._worst_s = 0.0
        """Largest recent excess of a step over its expected time."""
        # Decaying sums over steps with prompt tokens; long chunks weigh more, as intended.
        self._prompt_steps = 0.0
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self._squares = 0.0
        self._products = 0.0
        self._fixed_s = 0.0

    def slow_step_s(self, prompt_tokens: int) -> float:
        """Time that steps with ``prompt_tokens`` rarely exceed: the expected time plus the worst
        recent excess, because disturbances are not distributed like noise."""
        expected_s = self._expected_s(prompt_tokens)
        return expected_s + min(self._worst_s, _MAX_EXCESS * expected_s)

    @property
    def prompt_token_s(self) -> float:
        """Time that a prompt token adds to a decoding step; 0 until measured."""
        return self._by_token(self._mean_chunk_s)

    @property
    def chunk_s(self) -> float:
        """Fixed time that any prompt tokens add to a step; 0 until measured. On a GPU a step of
        only decodes is one recorded graph, and a step with a prompt is launched kernel by
        kernel."""
        return min(self._fixed_s, self._mean_chunk_s)

    @property
    def further_token_s(self) -> float:
        """Time that each token adds to a prompt chunk, without ``chunk_s``; 0 until measured."""
        return self._by_token(self._mean_chunk_s - self.chunk_s)

    def _by_token(self, chunk_s: float) -> float:
        """Seconds per prompt token if each of the latest chunks took ``chunk_s``."""
        return chunk_s * self._prompt_steps / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def _mean_chunk_s(self) -> float:
        """Mean time that prompt tokens added to the latest steps with prompt tokens."""
        if not self._prompt_steps:
            return 0.0
        return max(0.0, self._prompt_s / self._prompt_steps - self.plain_step_s)

    def prompt_tokens_within(self, stall_s: float, most: int) -> int:
        """Number of prompt tokens, at most ``most``, that delay a step's decodes by at most
        ``stall_s``; ``most`` until prompts were measured."""
        token_s, left_s = self.further_token_s, stall_s - self.chunk_s
        if token_s * most <= left_s:
            return most
        return int(left_s / token_s) if left_s > 0 else 0

    def prefill_s(self, prompt_tokens: int) -> float:
        """Expected time to compute ``prompt_tokens`` in a usual batch; 0 until measured."""
        return prompt_tokens * self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def decoded(
        self, duration_s: float, tokens_per_row: int, *, rows: int, prompt_tokens: int = 0
    ) -> None:
        """Record a step of ``rows`` with ``prompt_tokens`` in them, whose fastest row got
        ``tokens_per_row`` new tokens, at least one. Comes before ``prefilled`` of the same step."""
        if expected_s := self._expected_s(prompt_tokens):  # the first has none
            self._worst_s = max(self._worst_s * (1 - _WORST_FADES), duration_s - expected_s)
        known_s = self.step_s or duration_s
        self.step_s = known_s + (duration_s - known_s) * _SMOOTHING
        self._bound(duration_s, tokens_per_row, is_lone=rows == 1 and not prompt_tokens)

    def prefilled(self, duration_s: float, tokens: int) -> None:
        """Record a step of ``duration_s`` with ``tokens`` prompt tokens, and perhaps decodes. With
        ``tokens`` 0 it only decoded; it is the baseline for steps with prompts."""
        if not tokens:
            known_s = self.plain_step_s or duration_s
            self.plain_step_s = known_s + (duration_s - known_s) * _SMOOTHING
            return
        if self._prompt_tokens:
            # An accident does not show the cost of prompts; a new speed is learned in a few steps.
            duration_s = min(duration_s, _MAX_EXCESS * self._expected_s(tokens))
        fade = 1 - _SMOOTHING
        self._prompt_steps = self._prompt_steps * fade + 1
        self._prompt_tokens = self._prompt_tokens * fade + tokens
        self._prompt_s = self._prompt_s * fade + duration_s
        self._squares = self._squares * fade + tokens**2
        self._products = self._products * fade + tokens * duration_s
        self._split()

    def _split(self) -> None:
        """Split the time of chunks into a part per token and a fixed part, with a line through the
        latest chunks (least squares). If all have about the same size, the last split stays."""
        count = self._prompt_steps
        mean, mean_s = self._prompt_tokens / count, self._prompt_s / count
        variance = self._squares / count - mean**2
        if count < BOUND_STEPS or variance < (_SPLIT_SPREAD * mean) ** 2 or not self.plain_step_s:
            return
        token_s = (self._products / count - mean * mean_s) / variance
        self._fixed_s = max(0.0, mean_s - self.plain_step_s - max(0.0, token_s) * mean)

    def answered(self, tokens: int) -> None:
        """Record that an answer ended by itself after ``tokens`` tokens."""
        known = self.typical_tokens or tokens
        self.typical_tokens = known + (tokens - known) * _SMOOTHING

    def _expected_s(self, prompt_tokens: int) -> float:
        plain_s = self.plain_step_s or self.step_s
        if not prompt_tokens:
            return plain_s
        return plain_s + self.chunk_s + self.further_token_s * prompt_tokens

    def _bound(self, duration_s: float, tokens_per_row: int, *, is_lone: bool) -> None:
        """Learn the least time per token. A much shorter time restarts the count: the machine was
        busy before, and its best time is not known yet."""
        self._latest.append((duration_s, tokens_per_row))
        self._lone_steps += is_lone
        if len(self._latest) < BOUND_STEPS:
            return
        token_s = sum(s for s, _ in self._latest) / sum(tokens for _, tokens in self._latest)
        self._fastest_token_s = min(self._fastest_token_s, token_s)
        if token_s < self._counted_from_s * CERTAIN_SHARE:
            self._counted_from_s = token_s
            self._lone_steps = 0
        is_known = self._lone_steps >= CERTAIN_AFTER_STEPS
        self.least_token_s = self._fastest_token_s * CERTAIN_SHARE if is_known else 0.0
