"""Estimates how long steps take, measured outside the device."""

import math
from collections import deque
from typing import Final

from protocol import CERTAIN_AFTER_STEPS, CERTAIN_SHARE

_SMOOTHING: Final = 1 / 16
"""Weight of the latest step in the moving averages."""
BOUND_STEPS: Final = 8
"""Steps whose average counts: one read late makes the next look short."""
_WORST_FADES: Final = 1 / 512
"""Part by which the worst excess fades with each step: to a third in 512, some ten seconds."""
_SPLIT_SPREAD: Final = 0.25
"""Least spread of the latest chunks' sizes, as a share of their mean, that shows what of a chunk's
time is the same however few tokens it has."""
_MAX_EXCESS: Final = 4.0
"""Largest excess that counts, in mean steps: beyond that it is an accident, no reason to end jobs
early or to cut prompts into smaller chunks."""


class StepTime:
    """Running estimates of step times, in seconds unless the name says otherwise.

    Two bounds matter more than the mean: a job is dropped only if even the shortest step times seen
    would be too long, and one that ends cleanly before its deadline leaves room for a *slow* step.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        """Moving average over steps that decoded."""
        self.typical_tokens = 0.0
        """Moving average of the tokens of answers; 0 until one has ended."""
        self.plain_step_s = 0.0
        """Moving average over steps that only decoded; 0 until there was one."""
        self.least_token_s = 0.0
        """Least time that a token takes in any batch; 0 until known.

        The least time per token over ``BOUND_STEPS`` steps in a row, and a margin. Larger batches
        are slower and do not reveal it: it counts once enough steps had one row, and none since
        beat what would have been certain.
        """
        self._fastest_token_s = math.inf
        """Least time per token seen; it never grows."""
        self._counted_from_s = math.inf
        """The least time per token when the count of lone steps began."""
        self._latest: deque[tuple[float, int]] = deque(maxlen=BOUND_STEPS)
        """Seconds and tokens per row of the latest steps that decoded."""
        self._lone_steps = 0
        """Steps of a single row since the bound was last beaten."""
        self._worst_s = 0.0
        """Most that a recent step took beyond its expectation."""
        # Fading sums over steps with prompt tokens; long chunks weigh more, as they should.
        self._prompt_steps = 0.0
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self._squares = 0.0
        self._products = 0.0
        self._fixed_s = 0.0

    def slow_step_s(self, prompt_tokens: int) -> float:
        """Time that few steps with ``prompt_tokens`` exceed: what is expected, and the recent worst
        beyond that, for disturbances are not distributed like noise."""
        expected_s = self._expected_s(prompt_tokens)
        return expected_s + min(self._worst_s, _MAX_EXCESS * expected_s)

    @property
    def prompt_token_s(self) -> float:
        """Time that one more prompt token adds to a step that decodes anyway; 0 until measured."""
        return self._by_token(self._mean_chunk_s)

    @property
    def chunk_s(self) -> float:
        """Time that a step with prompt tokens takes beyond these, however few they are; 0 until
        measured. On a GPU decodes alone are one recorded graph, and a step with a prompt is
        launched kernel by kernel."""
        return min(self._fixed_s, self._mean_chunk_s)

    @property
    def further_token_s(self) -> float:
        """Time that each token adds to a chunk of a prompt, ``chunk_s`` left out; 0 until
        measured."""
        return self._by_token(self._mean_chunk_s - self.chunk_s)

    def _by_token(self, chunk_s: float) -> float:
        """Seconds per prompt token where each of the latest chunks took ``chunk_s``."""
        return chunk_s * self._prompt_steps / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def _mean_chunk_s(self) -> float:
        """Time that prompt tokens added to the latest steps that had some."""
        if not self._prompt_steps:
            return 0.0
        return max(0.0, self._prompt_s / self._prompt_steps - self.plain_step_s)

    def prompt_tokens_within(self, stall_s: float, most: int) -> int:
        """Number of prompt tokens that delay a step's decodes by ``stall_s`` at most.

        At most ``most``, which is returned while nothing is measured.
        """
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
        """Record that a step of ``rows``, with ``prompt_tokens`` in them, took ``duration_s``.

        Its fastest row got ``tokens_per_row`` new tokens, at least one. To be called before
        ``prefilled`` for the same step.
        """
        if expected_s := self._expected_s(prompt_tokens):  # the first has none
            self._worst_s = max(self._worst_s * (1 - _WORST_FADES), duration_s - expected_s)
        known_s = self.step_s or duration_s
        self.step_s = known_s + (duration_s - known_s) * _SMOOTHING
        self._bound(duration_s, tokens_per_row, is_lone=rows == 1 and not prompt_tokens)

    def prefilled(self, duration_s: float, tokens: int) -> None:
        """Record a step of ``duration_s`` that computed ``tokens`` of prompts, and maybe more.

        With ``tokens`` 0 it only decoded, which shows what prompts add to a step.
        """
        if not tokens:
            known_s = self.plain_step_s or duration_s
            self.plain_step_s = known_s + (duration_s - known_s) * _SMOOTHING
            return
        if self._prompt_tokens:
            # An accident says nothing about the cost of prompts; a new speed is learned in a few
            # steps.
            duration_s = min(duration_s, _MAX_EXCESS * self._expected_s(tokens))
        fade = 1 - _SMOOTHING
        self._prompt_steps = self._prompt_steps * fade + 1
        self._prompt_tokens = self._prompt_tokens * fade + tokens
        self._prompt_s = self._prompt_s * fade + duration_s
        self._squares = self._squares * fade + tokens**2
        self._products = self._products * fade + tokens * duration_s
        self._split()

    def _split(self) -> None:
        """Split the time of chunks into a part per token and a fixed part, by a line through the
        latest ones (least squares). If all had about one size, the last split stays."""
        count = self._prompt_steps
        mean, mean_s = self._prompt_tokens / count, self._prompt_s / count
        variance = self._squares / count - mean**2
        if count < BOUND_STEPS or variance < (_SPLIT_SPREAD * mean) ** 2 or not self.plain_step_s:
            return
        token_s = (self._products / count - mean * mean_s) / variance
        self._fixed_s = max(0.0, mean_s - self.plain_step_s - max(0.0, token_s) * mean)

    def answered(self, tokens: int) -> None:
        """Record that an answer ended by itself after ``tokens``."""
        known = self.typical_tokens or tokens
        self.typical_tokens = known + (tokens - known) * _SMOOTHING

    def _expected_s(self, prompt_tokens: int) -> float:
        plain_s = self.plain_step_s or self.step_s
        if not prompt_tokens:
            return plain_s
        return plain_s + self.chunk_s + self.further_token_s * prompt_tokens

    def _bound(self, duration_s: float, tokens_per_row: int, *, is_lone: bool) -> None:
        """Learn the least time per token.

        A much shorter time restarts the count: the machine was busy until now, and its best is not
        known yet.
        """
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
