"""The SSE parser against the standard's rules, and against itself under every way of cutting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import for_each
from tidegate import sse
from tidegate.errors import ProtocolError
from tidegate.sse import ServerSentEvent, SseParser


def parse(stream: bytes) -> list[ServerSentEvent]:
    return SseParser().feed(stream)


@for_each(
    ("stream", "expected"),
    [
        (
            b"data: a\n\nevent: token\nid: 7\ndata:b\n\n",
            [("message", "a", ""), ("token", "b", "7")],
        ),
        (b"data:  x\ndata\ndata: y\n\n", [("message", " x\n\ny", "")]),
        (b": keep-alive\n\nfoo: bar\nevent: x\n\ndata: a\n\n", [("message", "a", "")]),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [("message", "a", "")]),
        (b"id: 1\ndata: a\n\nid: 2\0\ndata: c\n\n", [("message", "a", "1"), ("message", "c", "1")]),
        (b"data: a\xffb\n\n", [("message", "a\ufffdb", "")]),
        (b"data: a\r\r", [("message", "a", "")]),  # at once, though an LF may follow
    ],
)
def test_the_rules_of_the_standard(stream: bytes, expected: list[tuple[str, str, str]]) -> None:
    assert parse(stream) == [ServerSentEvent(*each) for each in expected]


def test_id_of_an_unfinished_event_does_not_count() -> None:
    """Or a reconnect would skip the event whose end was lost."""
    parser = SseParser()
    parser.feed(b"id: 1\ndata: a\n\nid: 2\ndata: b\n")
    assert parser.last_event_id == "1"


def test_retry_takes_digits_only() -> None:
    parser = SseParser()
    parser.feed(b"retry: 250\n\nretry: soon\n\nretry: -1\n\n")
    assert parser.retry_ms == 250


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_SIZE", 100)
    parser = SseParser()
    parser.feed(b"data: " + b"x" * 80 + b"\n\n")
    with pytest.raises(ProtocolError):
        for _ in range(3):
            parser.feed(b"data: " + b"x" * 40 + b"\n")


LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "", "data", "data: ", "id: 4", "event: token", ": c", "retry: 9"]),
        st.text(alphabet="aé漢😀: ", max_size=12).map("data: {}".format),
    ),
    max_size=30,
)


@settings(max_examples=30)
@given(
    LINES,
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.lists(st.integers(1, 9)),
    st.data(),
)
def test_cutting_the_stream_anywhere_changes_nothing(
    lines: list[str], newline: str, with_bom: bool, sizes: list[int], data: st.DataObject
) -> None:
    stream = ("\ufeff" * with_bom + newline.join([*lines, ""])).encode()
    parser = SseParser()
    events = []
    rest = stream
    for size in sizes:
        events += parser.feed(rest[:size])
        rest = rest[size:]
    cut = data.draw(st.integers(0, len(rest)))
    events += parser.feed(rest[:cut]) + parser.feed(rest[cut:])
    whole = SseParser()
    assert events == whole.feed(stream)
    assert parser.last_event_id == whole.last_event_id
