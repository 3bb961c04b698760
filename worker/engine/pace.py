"""How fast this engine is: what a step takes, seen from outside the device."""

_SMOOTHING = 1 / 16
_FLOOR_RECOVERY = 1 / 64


class Pace:
    """Running estimates of the step time, seconds unless the name says otherwise.

    Two bounds matter more than the mean: a job is given up only if not even the *fastest* recent
    pace would do, and one that ends cleanly before its deadline leaves room for a *slow* step.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        """Moving average over steps that decoded."""
        self.fastest_token_s = 0.0
        """Time per token of one row at the best pace of late; 0 until measured."""
        self.typical_tokens = 0.0
        """Moving average of how long answers get; 0 until one has ended."""
        self._deviation_s = 0.0
        self._measured = False
        self.plain_step_s = 0.0
        """Moving average over steps that did nothing but decode; 0 until there was one."""
        # Fading sums over steps with prompt tokens; long chunks weigh more, as they should.
        self._prompt_steps = 0.0
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0

    @property
    def slow_step_s(self) -> float:
        """What few steps exceed: mean plus twice the mean deviation (as TCP times its resends)."""
        return self.step_s + 2 * self._deviation_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of the steps that had some; 0 until measured."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0

    @property
    def prompt_token_s(self) -> float:
        """What one more prompt token adds to a step that decodes anyway."""
        if not self._prompt_tokens:
            return 0.0
        added_s = self._prompt_s - self._prompt_steps * self.plain_step_s
        return max(0.0, added_s) / self._prompt_tokens

    def prompt_tokens_within(self, stall_s: float, most: int) -> int:
        """How many prompt tokens a step may carry, so that they delay its decodes by ``stall_s``.

        At most ``most``, which it is while nothing is measured.
        """
        token_s = self.prompt_token_s
        return most if token_s * most <= stall_s else int(stall_s / token_s)

    def service_s(self, prompt_tokens: int, new_tokens: float) -> float:
        """Expected time to compute so much of a prompt and then so many tokens, in company."""
        rate = self.prefill_tokens_per_s
        return (prompt_tokens / rate if rate else 0.0) + new_tokens * self.step_s

    def decoded(self, duration_s: float, tokens_per_row: int) -> None:
        """A step took ``duration_s`` and gave its fastest row ``tokens_per_row`` tokens."""
        token_s = duration_s / tokens_per_row
        if not self._measured:
            self._measured = True
            self.step_s, self.fastest_token_s = duration_s, token_s
            return
        error = duration_s - self.step_s
        self.step_s += error * _SMOOTHING
        self._deviation_s += (abs(error) - self._deviation_s) * _SMOOTHING
        if token_s < self.fastest_token_s:
            self.fastest_token_s = token_s
        else:
            self.fastest_token_s += (token_s - self.fastest_token_s) * _FLOOR_RECOVERY

    def prefilled(self, duration_s: float, tokens: int) -> None:
        """A step took ``duration_s`` and computed ``tokens`` of prompts, perhaps among others.

        With ``tokens`` 0 it did nothing but decode, which tells what prompts add to a step.
        """
        if not tokens:
            known = self.plain_step_s or duration_s
            self.plain_step_s = known + (duration_s - known) * _SMOOTHING
            return
        fade = 1 - _SMOOTHING
        self._prompt_steps = self._prompt_steps * fade + 1
        self._prompt_tokens = self._prompt_tokens * fade + tokens
        self._prompt_s = self._prompt_s * fade + duration_s

    def answered(self, tokens: int) -> None:
        """An answer ended by itself after ``tokens``."""
        known = self.typical_tokens or tokens
        self.typical_tokens = known + (tokens - known) * _SMOOTHING
