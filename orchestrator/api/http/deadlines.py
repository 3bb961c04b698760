"""A client's deadlines: read in every spelling, converted once to the monotonic clock (DL-1, DL-2).

For the whole request; the earliest of all wins:

=============================  ===========================================  ===========
``X-Deadline``                 RFC 3339 with offset, or epoch milliseconds  absolute
``grpc-timeout``               1 to 8 digits and one of ``H M S m u n``     relative
``X-Timeout-Ms``               milliseconds                                 relative
``deadline_ms``                milliseconds, in the body                    relative
``x-request-timeout-seconds``  seconds                                      relative
``x-litellm-timeout``          seconds; LiteLLM's                           relative
``x-stainless-read-timeout``   seconds; the Python SDKs'                    relative
``x-stainless-timeout``        whole seconds; the JavaScript SDKs'          relative
=============================  ===========================================  ===========

The last two say how long the SDK waits for an answer in one piece, or between two pieces of one:
they count for the former only, and where an operator wants them (``sdk_timeouts``).

For parts of the answer (DL-14), none negative; the smallest of all wins:

==============================  =======================  ============  ================
``first_token_ms``              milliseconds             in the body   ends the request
``X-First-Token-Timeout-Ms``    milliseconds                           ends the request
``x-llm-d-inference-ttl``       Go duration (``1m30s``)  llm-d's       ends the request
``x-llm-d-slo-ttft-ms``         milliseconds             llm-d's       a target
``token_gap_ms``                milliseconds             in the body   a target
``x-llm-d-slo-tpot-ms``         milliseconds             llm-d's       a target
==============================  =======================  ============  ================

llm-d's router bounds the wait in its queue by ``x-llm-d-inference-ttl``: what has begun goes on.
There, and so here, 0 states nothing.

A part that is missed makes the outcome ``missed``. Without a first token by a deadline that is no
target, the request ends there; a target that is missed stops nothing.

Relative ones count from the arrival of the request's head.
"""

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from orchestrator.clock import Instant
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.deadline import NO_PARTS, Deadline, DeadlineConfig, Parts

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

_RFC3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:)(\d{2})(\.\d+)?([Zz]|[+-]\d{2}:\d{2})", re.ASCII
)
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,9})?", re.ASCII)
_LEAST_S = -1e12
"""Further back is as late, and no number to show anyone."""
_SECONDS_OF_OUR_TIME = (1e9, 1e11)
"""What lies between is a time since 2001 in epoch seconds, but of the 1970s in milliseconds."""
_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_GRPC_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_GO_STEP = re.compile(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_GO_DURATION = re.compile(rf"[+-]?(?:0|(?:{_GO_STEP.pattern})+)", re.ASCII)
_GO_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_GO_UNIT_S |= {"m": 60.0, "h": 3600.0}


class StatesParts(Protocol):
    """The fields of a body that are read here."""

    @property
    def first_token_ms(self) -> float | None: ...
    @property
    def token_gap_ms(self) -> float | None: ...


def read_deadline(
    headers: Headers,
    body_ms: float | None,
    arrival: Instant,
    policy: DeadlineConfig,
    *,
    in_one_piece: bool = False,
) -> Deadline:
    """The deadline of a request, whose answer comes ``in_one_piece`` or bit by bit.

    Raises ``InvalidRequest`` for one that cannot be read.
    """
    stated = list(_budgets_s(headers, arrival))
    if in_one_piece and policy.reads_sdk_timeouts:
        stated += _sdk_timeouts_s(headers)
    if body_ms is not None:
        stated.append(body_ms / 1000)
    budget = max(min(stated, default=policy.default_s), _LEAST_S)
    clamped = budget > policy.max_s
    if clamped:
        budget = policy.max_s
    return Deadline(
        at=arrival.mono + budget,
        unix_ms=round((arrival.unix + budget) * 1000),
        clamped_ms=policy.max_s * 1000 if clamped else None,
        is_default=not stated,
    )


def stated_deadline(headers: Headers, arrival: Instant, policy: DeadlineConfig) -> Deadline | None:
    """The deadline that headers state, before there is a body; None for none that can be read."""
    try:
        deadline = read_deadline(headers, None, arrival, policy)
    except InvalidRequest:
        return None
    return None if deadline.is_default else deadline


def default_deadline(arrival: Instant, policy: DeadlineConfig) -> Deadline:
    """The one of a request that states none that can be read."""
    return read_deadline(CIMultiDict(), None, arrival, policy)


def read_parts(headers: Headers, body: StatesParts, arrival: Instant) -> Parts:
    """The deadlines for parts of an answer. Raises ``InvalidRequest`` for one that is no use."""
    timeouts = [
        *_positive_ms("first_token_ms", body.first_token_ms),
        *_positive_headers_ms(headers, "X-First-Token-Timeout-Ms"),
        *_ttls_ms(headers),
    ]
    targets = list(_positive_headers_ms(headers, "x-llm-d-slo-ttft-ms"))
    gaps = [
        *_positive_ms("token_gap_ms", body.token_gap_ms),
        *_positive_headers_ms(headers, "x-llm-d-slo-tpot-ms"),
    ]
    if not (timeouts or targets or gaps):
        return NO_PARTS
    return Parts(
        first_token_at=arrival.mono + min(timeouts + targets, default=math.inf) / 1000,
        token_gap_s=min(gaps, default=math.inf) / 1000,
        cut_at=arrival.mono + min(timeouts, default=math.inf) / 1000,
    )


def _positive_headers_ms(headers: Headers, name: str) -> Iterator[float]:
    for value in headers.getall(name, ()):
        stated = float(value) if _NUMBER.fullmatch(value.strip()) else 0.0
        if stated <= 0:
            raise _unreadable(name, value, "milliseconds above 0, such as 500")
        yield stated


def _positive_ms(field: str, value: float | None) -> Iterator[float]:
    if value is None:
        return
    if not value > 0:
        raise InvalidRequest(f"{field} must be milliseconds above 0, got {value:g}", field=field)
    yield value


def _ttls_ms(headers: Headers) -> Iterator[float]:
    for value in headers.getall("x-llm-d-inference-ttl", ()):
        seconds = _go_duration_s(value.strip())
        if seconds < 0:
            raise _unreadable("x-llm-d-inference-ttl", value, "a duration that is not negative")
        if seconds:
            yield 1000 * seconds


def _budgets_s(headers: Headers, arrival: Instant) -> Iterator[float]:
    for value in headers.getall("X-Deadline", ()):
        yield _absolute_s(value.strip()) - arrival.unix
    for value in headers.getall("grpc-timeout", ()):
        yield _grpc_timeout_s(value.strip())
    for value in headers.getall("X-Timeout-Ms", ()):
        if not _NUMBER.fullmatch(value.strip()):
            raise _unreadable("X-Timeout-Ms", value, "milliseconds, such as 1500")
        yield float(value) / 1000
    for name in ("x-request-timeout-seconds", "x-litellm-timeout"):
        for value in headers.getall(name, ()):
            if not _NUMBER.fullmatch(value.strip()):
                raise _unreadable(name, value, "seconds, such as 1.5")
            yield float(value)


def _sdk_timeouts_s(headers: Headers) -> Iterator[float]:
    """What is no number is for the SDK to know: nobody has written it by hand."""
    for name in ("x-stainless-read-timeout", "x-stainless-timeout"):
        for value in headers.getall(name, ()):
            # JavaScript's cuts off the fraction: 0 is any timeout below a second.
            if _NUMBER.fullmatch(value.strip()) and float(value) > 0:
                yield float(value)


def _absolute_s(value: str) -> float:
    if _NUMBER.fullmatch(value):
        number = float(value)
        if _SECONDS_OF_OUR_TIME[0] <= number < _SECONDS_OF_OUR_TIME[1]:
            raise InvalidRequest(
                f"X-Deadline takes epoch milliseconds; {value} looks like epoch seconds: "
                f"send {1000 * number:.0f}",
                field="X-Deadline",
            )
        return number / 1000
    match = _RFC3339.fullmatch(value)
    if match is not None:
        try:
            return _rfc3339_s(*match.groups(default="0"))
        except (ValueError, OverflowError):
            pass
    raise _unreadable(
        "X-Deadline", value, "RFC 3339 with an offset (2031-05-04T12:00:00Z) or epoch milliseconds"
    )


def _rfc3339_s(minute: str, second: str, fraction: str, zone: str) -> float:
    """Unix time. A leap second (RFC 3339, 5.7) is the first of the next day, as POSIX counts."""
    leap_s = second == "60"
    moment = datetime.fromisoformat(f"{minute}{'59' if leap_s else second}{zone}".upper())
    utc = moment.astimezone(UTC)
    if leap_s and (utc.hour, utc.minute) != (23, 59):
        raise ValueError("only the last minute of a day has a leap second")
    return moment.timestamp() + leap_s + float(fraction)


def _grpc_timeout_s(value: str) -> float:
    match = _GRPC_TIMEOUT.fullmatch(value)
    if match is None:
        raise _unreadable("grpc-timeout", value, "1 to 8 digits and one of H M S m u n, as in 500m")
    return int(match[1]) * _GRPC_UNIT_S[match[2]]


def _go_duration_s(value: str) -> float:
    """As Go's ``time.ParseDuration`` reads it, which is what llm-d's router does."""
    if not _GO_DURATION.fullmatch(value):
        raise _unreadable(
            "x-llm-d-inference-ttl", value, "a Go duration, such as 1500ms, 2s or 1m30s"
        )
    seconds = sum(float(count) * _GO_UNIT_S[unit] for count, unit in _GO_STEP.findall(value))
    return -seconds if value.startswith("-") else seconds


def _unreadable(header: str, value: str, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{header} cannot be read: expected {expected}, got {value[:64]!r}", field=header
    )
