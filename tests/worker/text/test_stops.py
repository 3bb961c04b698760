from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.tokenizers import ALL, ours
from worker.text import Fed, TextStream
from worker.text.text_stream import StopMatcher

LIBRARY = ALL["byte_level"]
TOKENIZER = ours(LIBRARY)

texts = st.text(alphabet="ab", max_size=30) | st.text(max_size=30)
stop_lists = st.lists(
    st.text(alphabet="ab", min_size=1, max_size=5) | st.text(min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def whole_text(text: str, stops: list[str]) -> tuple[str, bool]:
    """Oracle: cut before the stop string that ends first; of several, before the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=10))
@example(text="aab", stops=["ab", "aac"], cuts=[1, 2])
@example(text="abab", stops=["abc", "ba"], cuts=[1, 2, 3])
def test_any_split_is_cut_like_the_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    """WK-8."""
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for piece in in_pieces(text, cuts):
        passed = matcher.feed(piece)
        shown += passed.text
        stopped = passed.stopped
        assert whole_text(text, stops)[0].startswith(shown), "some of a stop string was shown"
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == whole_text(text, stops)
    assert bool(matcher.found) == stopped
    assert text.startswith(shown + matcher.found)


@given(text=texts, stops=stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for char in text:
        passed = matcher.feed(char)
        shown += passed.text
        if passed.stopped:
            return
    held = matcher.flush()
    assert shown + held == text
    assert not held or any(stop.startswith(held) for stop in stops)


@given(
    text=st.text(alphabet="ab🙂é", max_size=20),
    stops=st.lists(st.text(alphabet="ab🙂é", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_a_stream_is_its_text_cut_at_the_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = LIBRARY.encode(text).ids
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    stream = TextStream(TOKENIZER.detokenizer(), stops)
    shown, stopped = "", False
    for a, b in pairwise(edges):
        fed = stream.feed(ids[a:b])
        assert len(fed.texts) == b - a
        shown += "".join(fed.texts)
        if fed.stopped_at is not None:
            stopped = True
            assert not any(fed.texts[fed.stopped_at + 1 :])
            # The stop string ended within the token at stopped_at.
            done = LIBRARY.decode(ids[: a + fed.stopped_at + 1])
            before = LIBRARY.decode(ids[: a + fed.stopped_at]).rstrip("\ufffd")
            assert any(stop in done for stop in stops)
            assert not any(stop in before for stop in stops)
            break
    if not stopped:
        shown += stream.flush().text
    assert (shown, stopped) == whole_text(text, stops)


def test_texts_are_parallel_to_ids() -> None:
    ids = [LIBRARY.token_to_id(char) for char in "xEyENDz"]
    stream = TextStream(TOKENIZER.detokenizer(), ["END"])
    assert stream.feed(ids[:3]) == Fed(["x", "", "Ey"])
    assert stream.stop == ""
    assert stream.feed(ids[3:]) == Fed(["", "", "", ""], 2)
    assert stream.stop == "END"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    """WK-8: a text of at least min_tokens."""
    ids = [LIBRARY.token_to_id(char) for char in "abab"]
    stream = TextStream(TOKENIZER.detokenizer(), ["ab"], min_tokens=2)
    assert stream.feed(ids[:1]) == Fed(["a"])
    assert stream.feed(ids[1:]) == Fed(["b", "", ""], 2)


def test_half_a_character_may_complete_a_stop_string() -> None:
    byte = LIBRARY.encode("🙂").ids[0]
    stream: TextStream = TextStream(TOKENIZER.detokenizer(), ["\ufffd"])
    assert stream.feed([byte]).texts == [""]
    assert stream.flush() == ("", True)
