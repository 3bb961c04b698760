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

``deadline(10, tell_time=True)`` makes the block's chats one run, whose model is told how much of
the time is left and, at the share ``wind_down``, to give its final answer; from the share
``tools_until`` on it is shown no tools.
"""

import math
import uuid
from collections.abc import Mapping
from contextvars import ContextVar, Token
from datetime import timedelta
from typing import Any, Self

from tidegate import _clock

Deadline = timedelta | float
"""Deadline of one call from now: a ``timedelta``, or milliseconds as in ``deadline_ms``."""

_current: ContextVar[float | None] = ContextVar("tidegate_deadline", default=None)
"""When the innermost block ends, in seconds of ``_clock.now``; None outside of any block."""
_told: ContextVar[Mapping[str, Any]] = ContextVar("tidegate_told", default={})  # noqa: B039
"""Fields of the chats of the innermost block whose model is told of the time."""


class DeadlineScope:
    """A block with a deadline, as ``deadline`` returns it; time runs from when it is entered."""

    def __init__(self, seconds: float, told: Mapping[str, Any] | None = None) -> None:
        """``told`` has the fields of a block whose model is told of the time."""
        self._seconds = seconds
        self._tells = dict(told or {})
        self._entered: list[tuple[float, Token[float | None], Token[Mapping[str, Any]]]] = []

    def __enter__(self) -> Self:
        ends_at = _clock.now() + self._seconds
        outer = _current.get()
        if outer is not None:
            ends_at = min(ends_at, outer)
        told = _told.get()
        if self._tells:
            told = {"session_id": f"run-{uuid.uuid4().hex}", **self._tells}
        self._entered.append((ends_at, _current.set(ends_at), _told.set(told)))
        return self

    def __exit__(self, *_: object) -> None:
        entered = self._entered.pop()
        _current.reset(entered[1])
        _told.reset(entered[2])

    def remaining(self) -> float:
        """Seconds left, with an outer block's deadline considered; negative once it has passed."""
        if not self._entered:
            return self._seconds
        return self._entered[-1][0] - _clock.now()


def deadline(
    seconds: float | timedelta,
    *,
    tell_time: bool = False,
    wind_down: float | None = None,
    tools_until: float | None = None,
) -> DeadlineScope:
    """A block for ``with`` whose calls share ``seconds``. The others say whether, and at which
    shares left, its chats tell the model so. Raises ``ValueError`` unless finite."""
    stated = {"tell_time": tell_time or None, "wind_down": wind_down, "tools_until": tools_until}
    told = {name: value for name, value in stated.items() if value is not None}
    return DeadlineScope(block_seconds(seconds, "a deadline"), told)


def told() -> Mapping[str, Any]:
    """Fields that the caller's block adds to its chats; none outside of one that tells the time."""
    return _told.get()


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
