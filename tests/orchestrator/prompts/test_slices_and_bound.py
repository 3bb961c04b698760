"""Slices of a text give its own tokens, and the bound is one: for tokenizers of all kinds."""

import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from orchestrator.prompts.bound import TokenBound
from orchestrator.prompts.cuts import Lookalikes, Slicer
from orchestrator.prompts.tokens import TokenTexts
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


@cache
def bound_of(kind: Callable[[], Tokenizer]) -> TokenBound:
    return TokenBound(kind(), spellings(kind()))


def spellings(tokenizer: Tokenizer) -> list[bytes]:
    known = [*TokenTexts(tokenizer, ()).all_bytes()]
    assert known
    return known


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_slices_have_the_tokens_of_the_whole(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    slicer = slicer_of(kind)
    ids = [
        i for s in slicer.slices(text) for i in tokenizer.encode(s, add_special_tokens=False).ids
    ]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_prose_is_cut_into_many_slices(kind: Callable[[], Tokenizer]) -> None:
    text = "Once upon a time there was a little tiger, who liked tea. " * 100
    slices = list(slicer_of(kind).slices(text))
    assert len(slices) > 50
    assert max(map(len, slices)) < 200


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_the_bound(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    least = bound_of(kind).least_tokens(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_text_that_is_composed_first_has_no_bound() -> None:
    """Its bytes are others than those that become tokens."""
    bound = bound_of(byte_level)
    text = "\u1100\u1161\u11a8" * 1000
    assert bound.least_tokens(text) == 0
    assert bound.least_tokens(unicodedata.normalize("NFC", text)) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_says_something(kind: Callable[[], Tokenizer]) -> None:
    text = "Once upon a time there was a little tiger, who liked tea. " * 100
    assert bound_of(kind).least_tokens(text) > len(text) / 20


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", normalizers.NFKC()),
        lambda t: setattr(t, "normalizer", normalizers.Replace("aaaa", "a")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split("a", "removed")),
        lambda t: setattr(t, "model", models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True)),
    ],
)
def test_where_text_can_vanish_there_is_no_bound(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    change(tokenizer)
    assert TokenBound(tokenizer, [b"a"]).least_tokens("a" * 1000) == 0


def test_a_token_that_takes_the_spaces_around_it_makes_them_free() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    bound = TokenBound(tokenizer, [b"a", b" "])
    assert bound.least_tokens("a" + " " * 99) == 99  # rounded down
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert TokenBound(tokenizer, [b"a", b" "]).least_tokens("a" + " " * 99) <= 1


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
