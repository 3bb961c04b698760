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
        self.prefill_tokens_per_s = 0.0
        self._deviation_s = 0.0
        self._measured = False

    @property
    def slow_step_s(self) -> float:
        """What few steps exceed: mean plus twice the mean deviation (as TCP times its resends)."""
        return self.step_s + 2 * self._deviation_s

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
        """A step took ``duration_s`` and computed ``tokens`` of prompts among others."""
        if duration_s > 0:
            rate = tokens / duration_s
            known = self.prefill_tokens_per_s or rate
            self.prefill_tokens_per_s = known + (rate - known) * _SMOOTHING
