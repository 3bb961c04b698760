"""Measures where a task's time goes (DL-9, DL-18).

A task is always in exactly one phase, by the orchestrator's clock. So the parts of its budget never
overlap, and their sum is the time since it was received. The worker's report only divides the time
from dispatch to the first token, which the orchestrator cannot observe::

    received ──▶ sent ─────────────▶ started ──▶ first token ──▶ ended
       WAITING       SENT               PREFILL      DECODE
    ├─ queue ──┼─ queue in the worker, route, prefill ┼─ decode ─┤
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from orchestrator.tasks.ending import Budget
from protocol import End


class Phase(IntEnum):
    """The phases of a task; phases before ``DECODE`` end at the attempt's first token."""

    SENT = 0
    """The task was sent to a worker that has not reported a start."""
    PREFILL = 1
    DECODE = 2
    WAITING = 3
    """The task is being admitted, queued, paused, or between two attempts."""


@dataclass(slots=True, eq=False)
class TimeSpent:
    """One task's time by part, from when it was received. All times are seconds of the clock."""

    _since: float
    phase: Phase = Phase.WAITING
    _spent: list[float] = field(default_factory=lambda: [0.0] * len(Phase))
    """Seconds by phase of the present attempt, including waits before and during it."""
    _earlier: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Seconds of queue, route, prefill and decode of all earlier attempts."""
    _worker_wait_s: float | None = None
    """Seconds that the attempt waited in the worker's queue; None until it starts."""
    _paused_in: Phase = Phase.DECODE

    def sent(self, now: float) -> None:
        self._enter(Phase.WAITING, now)
        self._earlier = self.seconds(now)
        self._spent = [0.0] * len(Phase)
        self._worker_wait_s = None
        self.phase = Phase.SENT

    def started(self, now: float, wait_ms: float) -> None:
        """Record that the attempt's worker started, after ``wait_ms`` in its own queue."""
        if self.phase is Phase.SENT:
            self._enter(Phase.PREFILL, now)
            self._worker_wait_s = wait_ms / 1000

    def token(self, now: float) -> None:
        if self.phase < Phase.DECODE:
            self._enter(Phase.DECODE, now)

    def waits(self, now: float) -> None:
        """Record that the task is paused, or that its attempt ended and another may follow."""
        if self.phase is not Phase.WAITING:
            self._paused_in = self.phase
            self._enter(Phase.WAITING, now)

    def resumed(self, now: float) -> None:
        self._enter(self._paused_in, now)

    def restore(self, spent_s: Sequence[float], now: float) -> None:
        """Add the times that an earlier process counted, in the order of ``seconds``; the time
        since then counts as waiting. No part is negative, even if the clock was set back."""
        total, passed = sum(spent_s), max(0.0, now - self._since)
        share = min(1.0, passed / total) if total > 0 else 0.0
        queue, route, prefill, decode = (share * part for part in spent_s)
        self._earlier = (queue, route, prefill, decode)
        self._since += queue + route + prefill + decode

    def budget(self, now: float, left_ms: float, end: End | None = None) -> Budget:
        queue, route, prefill, decode = self.seconds(now, end)
        return Budget(1000 * queue, 1000 * route, 1000 * prefill, 1000 * decode, left_ms)

    def _enter(self, phase: Phase, now: float) -> None:
        # A frame's time is its arrival, which may precede a later report.
        now = max(now, self._since)
        self._spent[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def seconds(self, now: float, end: End | None = None) -> tuple[float, float, float, float]:
        """Seconds of queue, route, prefill and decode up to ``now``; ``end`` is the worker's report
        of the present attempt."""
        spent = self._spent.copy()
        spent[self.phase] += max(0.0, now - self._since)
        to_first_token = spent[Phase.SENT] + spent[Phase.PREFILL]
        if end is not None:
            wait, prefill = end.wait_ms / 1000, end.prefill_ms / 1000
        elif self._worker_wait_s is not None:
            wait, prefill = self._worker_wait_s, spent[Phase.PREFILL]
        else:  # not started: assume that it waits there
            wait, prefill = to_first_token, 0.0
        wait = min(max(0.0, wait), to_first_token)
        prefill = min(max(0.0, prefill), to_first_token - wait)
        route = to_first_token - wait - prefill
        queue = spent[Phase.WAITING] + wait
        return (
            self._earlier[0] + queue,
            self._earlier[1] + route,
            self._earlier[2] + prefill,
            self._earlier[3] + spent[Phase.DECODE],
        )
