"""Rules for sending a call again: when, how often, and after how long."""

import random
from dataclasses import dataclass

from tidegate.errors import ApiError, ConnectFailed, TidegateError

_jitter = random.Random()


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a call is sent again, and how patiently. Times are seconds.

    A call is repeated when nobody answered, or when the server says that another try can help
    (``x-should-retry``, else ``retryable`` in the error, else 429 and 503). The pause is what the
    server asks for (``retry-after-ms``), else ``first_s``, doubled each time up to ``most_s``,
    drawn between its half and its whole. A pause that a deadline cannot hold is never begun.
    """

    attempts: int = 3
    """Number of tries after the first one; 0 never retries."""
    first_s: float = 0.2
    most_s: float = 5.0
    longest_hint_s: float = 60.0
    """Longest pause a server may ask for; where it asks for more, the call is not retried."""

    def pause_s(self, attempt: int, error: TidegateError) -> float | None:
        """Seconds before retry number ``attempt`` (from 0); None where there is to be none."""
        if attempt >= self.attempts:
            return None
        if isinstance(error, ApiError):
            if not error.retryable:
                return None
            if error.retry_after_s is not None:
                hint = max(0.0, error.retry_after_s)
                return hint if hint <= self.longest_hint_s else None
        elif not isinstance(error, ConnectFailed):
            return None
        return min(self.first_s * 2.0**attempt, self.most_s) * _jitter.uniform(0.5, 1.0)


NO_RETRIES = Retries(attempts=0)
