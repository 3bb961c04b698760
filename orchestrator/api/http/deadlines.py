"""Reads a client's deadlines from all headers and fields, and converts them once to the monotonic
clock (DL-1, DL-2).

The earliest deadline for the whole request counts; the response names it (DL-20). Of the deadlines
for a part of the answer (DL-14), the smallest counts; none is negative. Relative deadlines count
from the arrival of the request's head. docs/api.md and docs/gateways.md list all spellings.

A bound is the time that a proxy or SDK waits for this exchange. It can make a deadline earlier but
not later. It is ignored for a task that outlives its connection. ``x-stainless-…`` is an SDK's
timeout for a whole answer or for the gap in a stream: it counts only for a whole answer.
``x-request-timeout`` has no standard. Without a unit it means seconds; values above 3600 are
probably milliseconds and are ignored. llm-d's router limits the wait in its queue by
``x-llm-d-inference-ttl``: a request that has started continues.

A missed part makes the outcome ``missed``. If a first-token deadline passes without a token, the
request ends, unless the deadline is a target: a missed target stops nothing. Clients set ``X-…``,
``grpc-timeout`` and the body: an unreadable value is an error. Values from gateways and SDKs never
cause a refusal: 0 means no deadline; unreadable values are ignored and named (``ignored``). If a
proxy joined several values with commas, all count."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from multidict import CIMultiDict, CIMultiDictProxy

from orchestrator.api.http.field_errors import must
from orchestrator.clock import Instant
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.deadline import DEFAULT, NO_PARTS, Deadline, DeadlineConfig, Parts

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

_RFC3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:)(\d{2})(\.\d+)?([Zz]|[+-]\d{2}:\d{2})", re.ASCII
)
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,9})?", re.ASCII)
_MIN_S = -1e12
"""Earliest deadline in seconds relative to arrival. Earlier ones are equivalent."""
_SECONDS_OF_OUR_TIME = (1e9, 1e11)
"""Range of plausible epoch seconds (since 2001). As milliseconds they would be in the 1970s."""
_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_GRPC_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_GO_STEP = re.compile(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_GO_DURATION = re.compile(rf"[+-]?(?:0|(?:{_GO_STEP.pattern})+)", re.ASCII)
_GO_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_GO_UNIT_S |= {"m": 60.0, "h": 3600.0}
_MAX_BARE_S = 3600.0
"""Largest number without a unit that is read as seconds, if some clients send milliseconds."""


_Read = Callable[[str], float | None]
"""Reads a header's value as a number in the header's unit; None if it is unreadable."""


class _Limit(NamedTuple):
    """A time limit in seconds from the arrival, and its header or field."""

    budget_s: float
    source: str


def read_deadline(
    headers: Headers,
    body_ms: float | None,
    arrival: Instant,
    policy: DeadlineConfig,
    *,
    is_awaited: bool = True,
    in_one_piece: bool = False,
    ignored: MutableSequence[str] | None = None,
) -> Deadline:
    """The deadline of a request. The answer is ``in_one_piece`` or a stream. Bounds count if the
    client waits on this connection (``is_awaited``). Unreadable headers of gateways and SDKs are
    added to ``ignored``. Raises ``InvalidRequest`` for unreadable values from the client."""
    passed_over: MutableSequence[str] = [] if ignored is None else ignored
    stated = list(_budgets(headers, arrival))
    for name, read in _DEADLINES_OF_OTHERS.items():
        stated += _limits_of_others(headers, name, read, passed_over)
    if body_ms is not None:
        stated.append(_Limit(body_ms / 1000, "deadline_ms"))
    own = min(stated, default=_Limit(policy.default_s, DEFAULT))

    def deadline_of(limit: _Limit) -> Deadline:
        budget_s = min(max(limit.budget_s, _MIN_S), policy.max_s)
        return Deadline(
            at=arrival.mono + budget_s,
            unix_ms=round((arrival.unix + budget_s) * 1000),
            clamped_ms=policy.max_s * 1000 if limit.budget_s > policy.max_s else None,
            is_default=not stated,
            source=limit.source,
        )

    deadline = deadline_of(own)
    if not is_awaited:
        return deadline
    bounds = list(_limits_of_others(headers, _ENVOY, _amount, passed_over, 1e-3))
    if in_one_piece:
        for name in _SDKS:
            bounds += _limits_of_others(headers, name, _amount, passed_over)
    bound = min(bounds, default=own)
    return deadline if bound >= own else replace(deadline_of(bound), unbounded=deadline)


def stated_deadline(headers: Headers, arrival: Instant, policy: DeadlineConfig) -> Deadline | None:
    """The deadline in the headers, before the body is read; None if there is no readable one."""
    try:
        deadline = read_deadline(headers, None, arrival, policy)
    except InvalidRequest:
        return None
    return None if deadline.source == DEFAULT else deadline


def read_parts(
    headers: Headers,
    first_token_ms: float | None,
    token_gap_ms: float | None,
    arrival: Instant,
    ignored: MutableSequence[str],
) -> Parts:
    """The deadlines for parts of an answer, of which a body may have two. Raises
    ``InvalidRequest`` for unusable values from the client. Unusable headers of gateways are added
    to ``ignored``."""

    def of_others(unit_s: float, read: _Read, *names: str) -> Iterator[float]:
        for name in names:
            for limit in _limits_of_others(headers, name, read, ignored, unit_s):
                yield 1000 * limit.budget_s

    timeouts = [
        *filter(None, [first_token_ms]),
        *_positive_headers_ms(headers, "X-First-Token-Timeout-Ms"),
        *of_others(1.0, _go_duration_s, "x-llm-d-inference-ttl"),
    ]
    targets = list(of_others(1e-3, _amount, *TTFT_TARGETS))
    gaps = [
        *filter(None, [token_gap_ms]),
        *of_others(1e-3, _amount, "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
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


def _budgets(headers: Headers, arrival: Instant) -> Iterator[_Limit]:
    for value in headers.getall("X-Deadline", ()):
        yield _Limit(_absolute_s(value.strip()) - arrival.unix, "X-Deadline")
    for value in headers.getall("grpc-timeout", ()):
        yield _Limit(_grpc_timeout_s(value.strip()), "grpc-timeout")
    for value in headers.getall("X-Timeout-Ms", ()):
        if not _NUMBER.fullmatch(value.strip()):
            raise _unreadable("X-Timeout-Ms", value, "milliseconds, such as 1500")
        yield _Limit(float(value) / 1000, "X-Timeout-Ms")


def _limits_of_others(
    headers: Headers, name: str, read: _Read, ignored: MutableSequence[str], unit_s: float = 1.0
) -> Iterator[_Limit]:
    """Limits from a header of gateways or SDKs; 0 means no limit."""
    for value in headers.getall(name, ()):
        for part in value.split(","):
            stated = read(part.strip())
            if stated is None or stated < 0:
                if name not in ignored:
                    ignored.append(name)
            elif stated:
                yield _Limit(stated * unit_s, name)


def _amount(value: str) -> float | None:
    return float(value) if _NUMBER.fullmatch(value) else None


def _seconds_or_duration(value: str) -> float | None:
    stated = _amount(value)
    if stated is None:
        return _go_duration_s(value)
    return stated if stated <= _MAX_BARE_S else None


_DEADLINES_OF_OTHERS: Mapping[str, _Read] = {
    "x-request-timeout-seconds": _amount,
    "x-litellm-timeout": _amount,
    "x-request-timeout": _seconds_or_duration,
    "Request-Timeout": _seconds_or_duration,
}
TTFT_TARGETS = (
    *("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    *("x-dynamo-slo-ttft-ms", "x-dynamo-meta-slo-ttft-ms"),
)
_ENVOY = "x-envoy-expected-rq-timeout-ms"
_SDKS = ("x-stainless-read-timeout", "x-stainless-timeout")


def _absolute_s(value: str) -> float:
    if _NUMBER.fullmatch(value):
        number = float(value)
        if _SECONDS_OF_OUR_TIME[0] <= number < _SECONDS_OF_OUR_TIME[1]:
            raise must(
                "X-Deadline",
                f"be in epoch milliseconds; {value} looks like epoch seconds: send "
                f"{1000 * number:.0f}",
            )
        return number / 1000
    if match := _RFC3339.fullmatch(value):
        with suppress(ValueError, OverflowError):
            return _rfc3339_s(*match.groups(default="0"))
    raise _unreadable(
        "X-Deadline", value, "RFC 3339 with an offset (2031-05-04T12:00:00Z) or epoch milliseconds"
    )


def _rfc3339_s(minute: str, second: str, fraction: str, zone: str) -> float:
    """Unix time in seconds. A leap second (RFC 3339, 5.7) is the next day's first second, as in
    POSIX."""
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


def _go_duration_s(value: str) -> float | None:
    """A duration in seconds, as Go's ``time.ParseDuration`` reads it; None if unreadable."""
    if not _GO_DURATION.fullmatch(value):
        return None
    seconds = sum(float(count) * _GO_UNIT_S[unit] for count, unit in _GO_STEP.findall(value))
    return -seconds if value.startswith("-") else seconds


def _unreadable(header: str, value: str, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{header} cannot be read: expected {expected}, got {value[:64]!r}", field=header
    )
