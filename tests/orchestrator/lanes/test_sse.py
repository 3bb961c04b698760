"""Server-sent events: however a body is cut, the events are the same."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.lanes.sse import EventReader, EventTooLong
from tests.support.cases import for_each

lines = st.one_of(
    st.binary(max_size=12).map(lambda b: b"data: " + re.sub(rb"[\r\n]", b".", b)),
    st.binary(max_size=6).map(lambda b: b"data:" + re.sub(rb"[\r\n]", b".", b)),
    st.sampled_from(
        [
            b"",
            b"",
            b"data",
            b"event: error",
            b"event:x",
            b": comment",
            b"id: 3",
            b"dat",
            b"retry: 1",
        ]
    ),
)
bodies = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=24).map(
    lambda parts: b"".join(line + end for line, end in parts)
)


def plainly(body: bytes) -> list[bytes]:
    """The standard's own steps, one line after the other."""
    events, data = [], []
    *whole, _ = re.split(rb"\r\n|\n|\r", body.removeprefix(b"\xef\xbb\xbf"))
    for line in whole:
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif not line and data:
            events.append(b"\n".join(data))
            data = []
    return events


def decoded(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@example(b"data: \ndata:\ndata:\r\n", [22, 22], True)
@given(bodies, st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_cutting_gives_the_events_of_the_standard(
    body: bytes, cuts: list[int], has_mark: bool
) -> None:
    body = (b"\xef\xbb\xbf" if has_mark else b"") + body
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(places)]
    assert decoded(pieces) == plainly(body)
    assert decoded([body[i : i + 1] for i in range(len(body))]) == plainly(body)


@for_each("body", [b"data: " + b"x" * 200, b"data\n" * 40])
def test_an_event_without_end_is_refused(body: bytes) -> None:
    decoder = EventReader(limit=128)
    with pytest.raises(EventTooLong):
        for at in range(0, len(body), 16):
            decoder.feed(body[at : at + 16])
