import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.cases import for_each
from tests.support.tokenizers import ALL, SPECIAL, ours

NAMES = sorted(ALL)


def detokenize(library: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Pieces of feeding ``ids`` in runs that end at ``cuts``, the flush last."""
    stream = ours(library).detokenizer()
    pieces: list[str] = []
    start = 0
    for cut in sorted({*(c % (len(ids) + 1) for c in cuts), len(ids)}):
        fed = stream.feed(ids[start:cut])
        assert len(fed) == cut - start
        pieces += fed
        start = cut
    return [*pieces, stream.flush()]


def spelled_bytes(library: Tokenizer, ids: list[int]) -> bytes:
    """Oracle for byte fallback: the tokens as they are spelled, joined."""
    joined = b""
    for token in (library.id_to_token(i) for i in ids):
        if token is None or token == SPECIAL:
            continue
        is_byte = token.startswith("<0x")
        joined += bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()
    return joined


ids_of_any = st.lists(st.integers(0, 400), max_size=30)
cuts_of_any = st.lists(st.integers(0, 30), max_size=6)


@given(ids=ids_of_any, cuts=cuts_of_any)
def test_any_ids_of_bytes_in_any_split_are_the_library_s_decode(
    ids: list[int], cuts: list[int]
) -> None:
    """WK-8: UTF-8 safe, whatever the model says."""
    library = ALL["byte_level"]
    assert "".join(detokenize(library, ids, cuts)) == library.decode(ids)


@given(ids=ids_of_any, cuts=cuts_of_any)
def test_invalid_bytes_are_replaced_as_in_one_decode_of_all(
    ids: list[int], cuts: list[int]
) -> None:
    """The library would replace a whole run of byte tokens, and so take back what was shown."""
    library = ALL["sentencepiece"]
    expected = spelled_bytes(library, ids).decode("utf-8", "replace")
    assert "".join(detokenize(library, ids, cuts)) == expected


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet="the fox jumps,é東🙂\n→x", max_size=40), cuts=cuts_of_any)
def test_any_text_in_any_split_is_the_library_s_decode(
    name: str, text: str, cuts: list[int]
) -> None:
    library = ALL[name]
    ids = library.encode(text, add_special_tokens=False).ids
    expected = library.decode(ids, skip_special_tokens=True)
    assert "".join(detokenize(library, ids, cuts)) == expected


@for_each("name", NAMES)
def test_silent_and_unknown_ids_print_nothing(name: str) -> None:
    library = ALL[name]
    stream = ours(library, silent=(1,)).detokenizer()
    assert stream.feed([1, library.token_to_id(SPECIAL)]) == ["", ""]
    if name != "word_piece":
        assert stream.feed([99_999]) == [""]


@for_each("name", NAMES)
def test_special_tokens_are_text_where_they_are_not_skipped(name: str) -> None:
    library = ALL[name]
    special = [i for i, t in library.get_added_tokens_decoder().items() if t.special]
    ids = [*library.encode("a fox", add_special_tokens=False).ids, *special]
    stream = ours(library).detokenizer(skip_special=False)
    text = "".join(stream.feed(ids)) + stream.flush()
    for token_id in special:
        assert library.id_to_token(token_id) in text
