"""Bounds of a run: a server that is tested must not suffer, and no test may go on for ever."""

import asyncio
from dataclasses import dataclass


class Spent(Exception):
    """A bound of the run was reached; the message says which, and how to have a wider one."""


class Unusable(Exception):
    """The server cannot be tested at all; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured at most, and the least of what is measured. Times adapt to the server's
    pace above these."""

    rounds: int = 3
    wave_s: float = 0.5
    """Seconds that a short answer takes about, alone."""
    least_deadline_s: float = 0.5
    most_streams: int = 64
    """Largest number of streams at once with which capacity is sought."""
    burst: int = 256
    """Requests in the burst that is to be refused in part."""
    longest: int = 1000
    """Tokens of the longest answers asked for, where the server takes so many."""
    patience_s: float = 30.0
    """Seconds after which a server that says nothing hangs."""
    requests: int = 4000
    """Largest number of requests in a run."""
    seconds: float = 600.0
    """Longest time of a run."""


class Budget:
    """What is left of a run's bounds."""

    def __init__(self, effort: Effort) -> None:
        self._clock = asyncio.get_running_loop().time
        self._effort = effort
        self.used = 0
        self.began = self._clock()

    @property
    def took_s(self) -> float:
        return self._clock() - self.began

    @property
    def left_s(self) -> float:
        """Seconds left, 0 at least."""
        return max(0.0, self._effort.seconds - self.took_s)

    def need(self, requests: int) -> None:
        """Raise ``Spent`` unless so many requests are left."""
        if self.used + requests > self._effort.requests:
            raise Spent(
                f"the run's bound of {self._effort.requests} requests leaves no room for"
                f" {requests} more; --requests widens it"
            )

    def take(self) -> None:
        """Count one request."""
        self.used += 1

    def out_of_time(self) -> Spent:
        return Spent(
            f"the run's bound of {self._effort.seconds:g} s was reached; --seconds widens it"
        )
