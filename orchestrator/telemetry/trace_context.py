"""The caller's position in a distributed trace: W3C's ``traceparent`` header."""

import re
from dataclasses import dataclass

# https://www.w3.org/TR/trace-context/#traceparent-header: a later version may append more fields.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A parent span: trace id and span id in lower-case hex, 32 and 16 digits."""

    trace_id: str
    span_id: str
    sampled: bool


def read_traceparent(header: str | None) -> TraceContext | None:
    """Read a ``traceparent`` header. None if it is missing or malformed: this is not an error."""
    if header is None:
        return None
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if more and version == "00":
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))
