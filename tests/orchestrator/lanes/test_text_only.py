"""Servers that take and give text alone: prompts out of ids, texts cut at stop strings."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from orchestrator.lanes.servers.text import PromptText, StopCutter
from tests.support.fake_worker import tokenizer_json

PLAIN = Tokenizer.from_buffer(tokenizer_json())


def adds_bos() -> bytes:
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer.to_str().encode()


def test_what_the_server_puts_around_a_prompt_is_left_to_it() -> None:
    ids = PLAIN.encode("hi there", add_special_tokens=False).ids
    assert PromptText(adds_bos()).text_of([0, *ids]) == "hi there"
    assert PromptText(tokenizer_json()).text_of([0, *ids]) == "<|bos|>hi there"
    assert PromptText(adds_bos()).text_of(ids) == "hi there"


def test_a_templates_special_tokens_stay_special() -> None:
    ids = [0, 3, *PLAIN.encode("hi", add_special_tokens=False).ids, 5, 4]
    text = PromptText(tokenizer_json()).text_of(ids)
    assert text == "<|bos|><|user|>hi<|end|><|assistant|>"
    assert PLAIN.encode(text, add_special_tokens=False).ids == ids


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4)))
def test_a_text_is_cut_before_the_first_stop_string_however_it_comes(
    text: str, stops: list[str]
) -> None:
    cutter = StopCutter(stops)
    shown = ""
    for letter in text:
        shown += cutter.feed(letter)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if cutter.found:
        # The one that was complete first, as the letters came.
        end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        assert text[:end].endswith(cutter.found)
        assert shown == text[: end - len(cutter.found)]
    else:
        assert not found
        assert shown + cutter.held == text


def test_the_first_of_two_in_one_piece_counts() -> None:
    cutter = StopCutter(["yy", "x"])
    assert cutter.feed("abyyx") == "ab"
    assert cutter.found == "yy"
    assert cutter.feed("more") == ""
