"""A client's deadline: read in every spelling, converted once to the monotonic clock (DL-1, DL-2).

===================  ===========================================  ===========
``X-Deadline``       RFC 3339 with offset, or epoch milliseconds  absolute
``grpc-timeout``     1 to 8 digits and one of ``H M S m u n``     relative
``X-Timeout-Ms``     milliseconds                                 relative
``deadline_ms``      milliseconds, in the body                    relative
===================  ===========================================  ===========

Relative ones count from the arrival of the request's head. The earliest of all wins.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from multidict import CIMultiDict, CIMultiDictProxy

from orchestrator.clock import Instant
from orchestrator.errors import DeadlineExceeded, InvalidRequest

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

_RFC3339 = re.compile(
    r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII
)
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,9})?", re.ASCII)
_LEAST_MS = -1e15
"""Further back is as late, and no number to show anyone; headers cannot say more either."""
_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_GRPC_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, slots=True)
class DeadlinePolicy:
    """What an operator gives to those who ask for none, and at most."""

    default_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock. ``unix_ms`` is the same on the wall, for logs only."""

    at: float
    unix_ms: int
    clamped_ms: float | None = None
    """The maximum, where the client asked for more than that."""

    def left_ms(self, now: float) -> float:
        """Milliseconds that remain at ``now``; negative once it is past."""
        return (self.at - now) * 1000

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
                f"{left:.1f} ms remain until the deadline; more than {floor_ms:g} ms are needed",
                exceeded_by_ms=0.0,
            )


def read_deadline(
    headers: Headers, body_ms: float | None, arrival: Instant, policy: DeadlinePolicy
) -> Deadline:
    """The deadline of a request. Raises ``InvalidRequest`` for one that cannot be read."""
    stated = list(_budgets_s(headers, arrival))
    if body_ms is not None:
        stated.append(max(body_ms, _LEAST_MS) / 1000)
    budget = min(stated, default=policy.default_s)
    clamped = budget > policy.max_s
    if clamped:
        budget = policy.max_s
    return Deadline(
        at=arrival.mono + budget,
        unix_ms=round((arrival.unix + budget) * 1000),
        clamped_ms=policy.max_s * 1000 if clamped else None,
    )


def _budgets_s(headers: Headers, arrival: Instant) -> Iterator[float]:
    for value in headers.getall("X-Deadline", ()):
        yield _absolute_s(value.strip()) - arrival.unix
    for value in headers.getall("grpc-timeout", ()):
        yield _grpc_timeout_s(value.strip())
    for value in headers.getall("X-Timeout-Ms", ()):
        if not _NUMBER.fullmatch(value.strip()):
            raise _unreadable("X-Timeout-Ms", value, "milliseconds, such as 1500")
        yield float(value) / 1000


def _absolute_s(value: str) -> float:
    if _NUMBER.fullmatch(value):
        return float(value) / 1000
    if _RFC3339.fullmatch(value):
        try:
            return datetime.fromisoformat(value.upper()).timestamp()
        except (ValueError, OverflowError):
            pass
    raise _unreadable(
        "X-Deadline", value, "RFC 3339 with an offset (2031-05-04T12:00:00Z) or epoch milliseconds"
    )


def _grpc_timeout_s(value: str) -> float:
    match = _GRPC_TIMEOUT.fullmatch(value)
    if match is None:
        raise _unreadable("grpc-timeout", value, "1 to 8 digits and one of H M S m u n, as in 500m")
    return int(match[1]) * _GRPC_UNIT_S[match[2]]


def _unreadable(header: str, value: str, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{header} cannot be read: expected {expected}, got {value[:64]!r}", field=header
    )
