"""Limits second tries to a share of the requests offered; retries and hedges each have a budget."""


class RetryBudget:
    """A token bucket that requests fill and second tries empty."""

    def __init__(self, share: float, burst: float, *, is_full: bool = True) -> None:
        self._share = share
        self._burst = burst if share else 0.0
        self._tokens = self._burst if is_full else 0.0

    def offered(self) -> None:
        self._tokens = min(self._burst, self._tokens + self._share)

    @property
    def is_empty(self) -> bool:
        return self._tokens < 1.0

    def spend(self) -> None:
        assert not self.is_empty
        self._tokens -= 1.0
