"""Deadlines on the monotonic clock: of a request (DL-1, DL-2) and parts of its answer (DL-14).

``api.http.deadlines`` parses the deadlines that clients state.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from pydantic import Field

from orchestrator.errors import DeadlineExceeded
from worker.environment import Section

DEFAULT: Final = "default"
REPORT_GRACE_S: Final = 0.02
"""Seconds after a deadline in which a worker may still report it; then the orchestrator ends the
task. Enough for some steps and the way back, too short for a client to notice."""
RUN: Final = "run"
"""Source of a deadline that an earlier call of the same run stated."""


class Part(StrEnum):
    """Parts of an answer that have their own deadlines and can be missed (DL-14)."""

    FIRST_TOKEN = "first_token"
    TOKEN_GAP = "token_gap"
    WHOLE = "whole"


class DeadlineConfig(Section):
    """The operator's limits on deadlines (DL-1, DL-3)."""

    default_s: float = Field(default=300.0, gt=0)
    """Deadline of requests that state none."""
    max_s: float = Field(default=1800.0, gt=0)
    """Longest deadline; a longer one is shortened, and the answer says so."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock. ``unix_ms`` is the same point on the wall clock in ms, only
    for logs."""

    at: float
    unix_ms: int
    clamped_ms: float | None = None
    """The maximum in ms if the client asked for more, otherwise None."""
    is_default: bool = False
    """Whether the client stated none. A proxy may wait for a shorter time than the default."""
    source: str = ""
    """The header or field that it was read from, ``default`` or ``run``; empty if no longer
    known."""
    unbounded: "Deadline | None" = None
    """The client's deadline, or the default, if a gateway or SDK waits for less; otherwise None."""

    def left_ms(self, now: float) -> float:
        """Milliseconds that remain at ``now``; negative after the deadline."""
        return (self.at - now) * 1000

    def moved(self, by_s: float) -> "Deadline":
        """The same deadline on a clock that is ``by_s`` seconds ahead."""
        unbounded = None if self.unbounded is None else self.unbounded.moved(by_s)
        return replace(self, at=self.at + by_s, unbounded=unbounded)

    def require(self, floor_ms: float, now: float) -> None:
        """Raise ``DeadlineExceeded`` unless more than ``floor_ms`` remain."""
        left = self.left_ms(now)
        if left <= 0:
            raise DeadlineExceeded(
                f"the deadline passed {-left:.0f} ms before the request was admitted",
                exceeded_by_ms=-left,
            )
        if left <= floor_ms:
            raise DeadlineExceeded(
                f"{left:.1f} ms remain until the deadline; more than {floor_ms:g} ms are needed"
            )


@dataclass(frozen=True, slots=True)
class Parts:
    """Deadlines for parts of an answer (DL-14); infinite if unstated.

    ``first_token_at`` is a point on the monotonic clock. ``token_gap_s`` defines a schedule, not a
    limit between two packets: token ``n`` is due ``n - 1`` gaps after the first-token deadline, or
    after the first token if no such deadline is stated. A client may read early tokens while a
    later one is late. (QoServe, earlier Niyama, arXiv 2503.22562; Andes, arXiv 2404.16283.)
    """

    first_token_at: float = math.inf
    token_gap_s: float = math.inf
    cut_at: float = math.inf
    """Time at which a request without a token ends. Never before ``first_token_at``, which may be a
    target only."""

    def due_at(self, number: int, first_came_at: float) -> float:
        """When token ``number`` (from 1) is due; the first token came at ``first_came_at``."""
        if number <= 1:
            return self.first_token_at
        start = self.first_token_at if self.first_token_at < math.inf else first_came_at
        return start + (number - 1) * self.token_gap_s

    def require(self, floor_ms: float, now: float) -> None:
        """Raise ``DeadlineExceeded`` unless the first token has more than ``floor_ms`` left."""
        left_ms = (self.cut_at - now) * 1000
        if left_ms <= floor_ms:
            raise DeadlineExceeded(
                f"{max(0.0, left_ms):.1f} ms remain until the first token's deadline; "
                f"more than {floor_ms:g} ms are needed",
                exceeded_by_ms=-left_ms if left_ms <= 0 else None,
                part=Part.FIRST_TOKEN,
            )


NO_PARTS: Final = Parts()
"""The parts of most requests; compared by identity, because the check runs for every token."""
