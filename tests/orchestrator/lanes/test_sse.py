"""Server-sent events: however a body is cut, the events are the same."""

import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lanes.http.sse import EventTooLong, SseDecoder

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


def plainly(body: bytes) -> list[tuple[bytes, bytes]]:
    """The standard's own steps, one line after the other."""
    events, data, name = [], [], b""
    *whole, _ = re.split(rb"\r\n|\n|\r", body.removeprefix(b"\xef\xbb\xbf"))
    for line in whole:
        if not line:
            if data:
                events.append((b"\n".join(data), name))
            data, name = [], b""
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event" and b":" in line:
            name = value.removeprefix(b" ")
    return events


def decoded(pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    decoder = SseDecoder()
    return [(bytes(e.data), e.name) for piece in pieces for e in decoder.feed(piece)]


@given(bodies, st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_cutting_gives_the_events_of_the_standard(
    body: bytes, cuts: list[int], has_mark: bool
) -> None:
    body = (b"\xef\xbb\xbf" if has_mark else b"") + body
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(places)]
    assert decoded(pieces) == plainly(body)
    assert decoded([body[i : i + 1] for i in range(len(body))]) == plainly(body)


def test_a_whole_event_is_not_copied() -> None:
    chunk = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n'
    first, second = SseDecoder().feed(chunk)
    assert first.data.obj is chunk
    assert second.data.obj is chunk


def test_events_outlive_what_comes_after_them() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: one") == []
    (event,) = decoder.feed(b" half\n\ndata: x")
    decoder.feed(b"y" * 100)
    assert bytes(event.data) == b"one half"


@pytest.mark.parametrize("body", [b"data: " + b"x" * 200, b"data: xxxxxxxxx\n" * 20])
def test_an_event_without_end_is_refused(body: bytes) -> None:
    decoder = SseDecoder(limit=128)
    with pytest.raises(EventTooLong):
        for at in range(0, len(body), 16):
            decoder.feed(body[at : at + 16])


def test_lines_without_bytes_have_a_bound_too() -> None:
    decoder = SseDecoder()
    with pytest.raises(EventTooLong):
        for _ in range(40):
            decoder.feed(b"data\n" * 1000)


def test_what_waits_for_its_events_end_keeps_no_chunk() -> None:
    decoder = SseDecoder()
    chunk = b": comment\n" * 10_000 + b"data: x\n"
    before = sys.getrefcount(chunk)
    decoder.feed(chunk)
    assert sys.getrefcount(chunk) == before
    assert [bytes(event.data) for event in decoder.feed(b"data: y\n\n")] == [b"x\ny"]


def test_an_event_may_be_renamed_as_often_as_its_server_likes() -> None:
    decoder = SseDecoder(limit=1000)
    for _ in range(1000):
        decoder.feed(b"event: news\n")
    assert decoder.feed(b"data: x\n\n")[0].name == b"news"
