"""A deadline for everything within a block::

    with tidegate.deadline(10):                  # seconds
        plan = await client.generate(question)   # has 10 s
        with tidegate.deadline(3):               # the earlier one counts
            hint = await client.generate(plan.text)
        await client.generate(...)               # has what is left of the 10 s

It works in ``async`` code and in plain code, and holds for the tasks and threads that inherit the
context (``asyncio.create_task``, ``asyncio.to_thread``). Every call states what is left of it to
the server, and raises ``DeadlineExceeded`` without asking when nothing is. Your own code is not
interrupted.
"""

import math
from contextvars import ContextVar, Token
from datetime import timedelta
from typing import Self

from tidegate import _clock

Deadline = timedelta | float
"""Deadline of one call, counted from now: a ``timedelta``, or milliseconds as in
``deadline_ms``."""

_current: ContextVar[float | None] = ContextVar("tidegate_deadline", default=None)
"""When the innermost block ends, in seconds of ``_clock.now``; None outside of any block."""


class DeadlineScope:
    """A block with a deadline, as ``deadline`` returns it; time runs from when it is entered."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entered: list[tuple[float, Token[float | None]]] = []

    def __enter__(self) -> Self:
        ends_at = _clock.now() + self._seconds
        outer = _current.get()
        if outer is not None:
            ends_at = min(ends_at, outer)
        self._entered.append((ends_at, _current.set(ends_at)))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._entered.pop()[1])

    def remaining(self) -> float:
        """Seconds left, with an outer block's deadline considered; negative once it has passed."""
        if not self._entered:
            return self._seconds
        return self._entered[-1][0] - _clock.now()


def deadline(seconds: float | timedelta) -> DeadlineScope:
    """A block for ``with`` whose calls share ``seconds``. Raises ``ValueError`` unless finite."""
    return DeadlineScope(block_seconds(seconds, "a deadline"))


def block_seconds(given: float | timedelta, name: str) -> float:
    """``given`` in seconds. Raises ``ValueError``, which calls it ``name``, unless it is finite."""
    try:
        seconds = given.total_seconds() if isinstance(given, timedelta) else float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{name} is a timedelta or a finite number of seconds, got {given!r}")
    return seconds


def remaining() -> float | None:
    """Seconds left of the caller's block, negative once they are over; None outside of any."""
    ends_at = _current.get()
    return None if ends_at is None else ends_at - _clock.now()


def to_seconds(deadline: Deadline) -> float:
    """A relative deadline (a ``timedelta`` or milliseconds) in seconds."""
    return deadline.total_seconds() if isinstance(deadline, timedelta) else deadline / 1000
