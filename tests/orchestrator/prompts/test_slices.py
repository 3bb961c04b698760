"""Slices of a text give its own tokens, for tokenizers of all kinds."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.prompts.cuts import Lookalikes, Slicer
from orchestrator.prompts.tokens import VocabularyTexts
from tests.support.tokenizers_of_all_kinds import byte_level, demo, metaspace

KINDS = (byte_level, metaspace, demo)
PIECES = (
    *("the", "Licence", "tiger", "naïve", "cafe\u0301", "老虎", "喝茶", "it's", "don't", "x" * 300),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ". ",
        ", ",
        "，",
        "。",
        "! ",
        "(",
        ") ",
        "-",
        "_",
        "'",
        '"',
        "1",
    ),
    *("1234", "<|im_start|>", "</s>", "▁", "\ufeff", "🐯", "e\u0301", "\u1100\u1161\u11a8"),
)
texts = st.lists(st.sampled_from(PIECES), max_size=120).map("".join)


@cache
def slicer_of(kind: Callable[[], Tokenizer]) -> Slicer:
    return Slicer(kind(), spellings(kind()), 20)


def spellings(tokenizer: Tokenizer) -> list[bytes]:
    known = [*VocabularyTexts(tokenizer, ()).all_bytes()]
    assert known
    return known


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(text=texts)
def test_slices_have_the_tokens_of_the_whole(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    slicer = slicer_of(kind)
    ids = [
        i for s in slicer.slices(text) for i in tokenizer.encode(s, add_special_tokens=False).ids
    ]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_cannot_be_cut_is_one_slice() -> None:
    unknown = Slicer(byte_level(), (), 10)
    assert len(list(unknown.slices("once upon a time " * 10))) == 1
    assert len(list(slicer_of(byte_level).slices("x" * 1000))) == 1
    # No cut between a letter and what follows it in a token.
    crossing = Slicer(byte_level(), [b"n a", b"e,"], 10)
    assert {s[0] for s in crossing.slices("one, two; in a " * 10)} == {"o", ";"}


@given(text=st.text("<|ab>", max_size=40), at=st.integers(0, 40))
def test_lookalikes_are_found_wherever_they_are(text: str, at: int) -> None:
    tokens = ("<|a|>", "<|ab", "ab", "<<", "b")  # the last is too short to be broken
    places = [
        at for at in range(len(text)) if any(text.startswith(token, at) for token in tokens[:-1])
    ]
    lookalikes = Lookalikes(tokens)
    assert list(lookalikes.starts(text)) == places
    assert [*lookalikes.starts(text, 0, at), *lookalikes.starts(text, at)] == places
    assert not list(Lookalikes([]).starts(text))


def test_lookalikes_across_the_border_of_what_is_searched_at_once() -> None:
    lookalikes = Lookalikes(["<|end|>"])
    for before in range(31_990, 32_010):
        assert list(lookalikes.starts("x" * before + "<|end|>" + "x" * 99)) == [before]
