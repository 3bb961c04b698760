"""OR-16: the caller's trace is read from ``traceparent``, and a broken one harms nobody."""

from orchestrator.telemetry.trace_context import TraceContext, read_traceparent
from tests.support.cases import for_each

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@for_each(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f" 00-{TRACE}-{SPAN}-03 ", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"cc-{TRACE}-{SPAN}-01-what a later version adds", True),
    ],
)
def test_a_traceparent_is_read(header: str, sampled: bool) -> None:
    assert read_traceparent(header) == TraceContext(TRACE, SPAN, sampled)


@for_each(
    "header",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-zz",
    ],
)
def test_a_broken_one_counts_as_none(header: str | None) -> None:
    assert read_traceparent(header) is None
